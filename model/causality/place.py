"""Where a leak is: the output, the input that it depends on, and the submodule.

B batch, T positions, V vocabulary.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tril.model.causality.model import Model

RELATIVE_ROUNDING = {torch.float64: 1e-11}  # of two ways to compute the same values; 1e-5 in lower precisions


def find_leak(
    model: Model, ids: Tensor, changed: Tensor, compared: Tensor, limit: float, seed: int
) -> tuple[str, dict[str, Any]]:
    """The first leak in words, and its fields in a `Result`.

    Args:
        ids, changed: two batches (B, T) whose compared outputs, bool (B, T), should be equal up to `limit`.
    """

    def effect(ids: Tensor, changed: Tensor) -> Tensor:  # (B, T)
        return largest_change(model(changed, seed=seed), model(ids, seed=seed))

    compared = compared.to(model.device)
    row = int(effect(ids, changed).masked_fill(~compared, 0.0).amax(1).argmax())
    one, other, outputs = ids[row : row + 1], changed[row : row + 1], compared[row : row + 1]
    if model.batch_size:  # a compiled function takes no single row
        one, other = (text.repeat(model.batch_size, 1) for text in (one, other))
    alone = effect(one, other)[:1].masked_fill(~outputs, 0.0)  # (1, T)
    if len(ids) > 1 and not alone.max() > limit:
        rest = changed.clone()
        rest[row] = ids[row]
        by_others = effect(ids, rest)[row]  # (T,)
        query = int(by_others.argmax())
        if not (by_others.max() > limit).item():
            return f"row {row} depends on its hidden tokens in a batch of {len(ids)} only", {}
        passes = [
            Pass(lambda x=x: model(x, seed=seed), query, ids.shape[1], row=row, rows=len(ids)) for x in (ids, rest)
        ]
        place = first_difference(model.module, *passes, exact=True)
        return f"row {row} depends on the other rows of its batch{in_words(place)}", {"place": place or ""}
    query = int((alone[0] > limit).nonzero()[0]) if (alone > limit).any() else int(outputs[0].nonzero()[0])

    # This output may see less than the one whose hidden tokens were replaced: the nearest input is the clearest.
    hidden = ~model.visible(one.shape[1])[query] & (one == other)
    wider = torch.where(hidden, (one + 1) % model.vocab_size, other)
    if (effect(one, wider)[0, query] > limit).item():
        other = wider

    def mixed(keys: Tensor) -> Tensor:
        text = one.clone()
        text[:, keys] = other[:, keys]
        return text

    different = (one != other)[0].nonzero().flatten()
    keys = smallest_cause(different, lambda keys: bool((effect(one, mixed(keys))[0, query] > limit).item()))
    # Effects of several inputs may cancel out at an earlier output, from which a later one depends on these.
    earlier = (effect(one, mixed(keys))[0, :query] > limit) & outputs[0, :query]
    query = int(earlier.nonzero()[0]) if earlier.any() else query
    passes = [Pass(lambda x=x: model(x, seed=seed), query, x.shape[1]) for x in (one, mixed(keys))]
    place = first_difference(model.module, *passes, exact=not limit)
    at = f"input {int(keys[0])}" if len(keys) == 1 else f"inputs {int(keys.min())} to {int(keys.max())} together"
    outside = "" if int(keys[0]) > query else ", outside of what it may see"
    where = f"output {query} depends on {at}{outside}{in_words(place)}"
    return where, {"query": query, "key": int(keys[0]), "place": place or ""}


def largest_change(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference of outputs (..., V) at each position, (...); nan or the same infinity in both is none."""
    if torch.equal(a, b):  # one pass over the memory instead of ten; false for nan
        return a.new_zeros(a.shape[:-1])
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).detach().abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf).amax(-1)


def smallest_cause(keys: Tensor, leaks: Callable[[Tensor], bool]) -> Tensor:
    """Halves the changed positions for as long as one half alone still leaks."""
    while len(keys) > 1:
        half = len(keys) // 2
        smaller = next((keys for keys in (keys[:half], keys[half:]) if leaks(keys)), None)
        if smaller is None:
            break
        keys = smaller
    return keys


@dataclass(frozen=True)
class Pass:
    """One pass over a text.

    Attributes:
        run: calls the model.
        query: the position that is compared, of `length`.
        row: of a batch of `rows`, the only one that is compared; None: all.
        chunked: it calls the model once for each chunk of the text; the chunk with the query is compared.
    """

    run: Callable[[], object]
    query: int
    length: int
    row: int | None = None
    rows: int = 1
    chunked: bool = False


@torch.no_grad()
def first_difference(module: nn.Module | None, one: Pass, other: Pass, *, exact: bool) -> str | None:
    """Name of the first submodule with equal inputs and different outputs at the query.

    Args:
        exact: equal means bit for bit; otherwise up to rounding.

    Returns:
        "" for the code of the module itself, None for a function, and where no submodule shows the difference.
    """
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return None
    before, after = (_numbered(_Trace(each).events_of(module)) for each in (one, other))
    active: list[str] = []
    for (name, kind, number), values in before.items():
        if (name, kind, number) not in after:
            continue
        pairs = [(a, b) for a, b in zip(values, after[name, kind, number], strict=False) if a.shape == b.shape]
        if not all(_equal(a, b, exact) for a, b in pairs):
            owner = name.rpartition(".")[0]
            caller = active[-1] if active else ""
            skipped = owner.startswith(caller) and not isinstance(module.get_submodule(owner), nn.ModuleList)
            return name if kind == "out" else owner if skipped else caller
        if kind == "in":
            active.append(name)
        elif active:
            active.pop()
    return None


def in_words(place: str | None) -> str:
    """The end of a message; `place` as `first_difference` returns it."""
    return "" if place is None else f", first in {place or 'the code of the model itself'}"


Event = tuple[str, str, list[Tensor]]  # name of a submodule, "in" or "out", values at the query


def _numbered(events: list[Event]) -> dict[tuple[str, str, int], list[Tensor]]:
    """The events by name, kind, and how often this name and kind came before."""
    seen: Counter[tuple[str, str]] = Counter()
    numbered = {}
    for name, kind, values in events:
        numbered[name, kind, seen[name, kind]] = values
        seen[name, kind] += 1
    return numbered


@dataclass
class _Trace:
    """What enters and leaves each submodule at the query, in the order of execution."""

    of: Pass
    events: list[Event] = field(default_factory=list)
    start: int = 0  # of the chunk that is computed
    size: int = 0

    def events_of(self, module: nn.Module) -> list[Event]:
        with removed_at_exit(list(self._hooks(module))):
            self.of.run()
        return self.events

    def _hooks(self, module: nn.Module) -> Iterator:
        for name, part in module.named_modules():
            with contextlib.suppress(RuntimeError):  # a ScriptModule takes no hooks
                yield part.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: self._keep(name, "in", (args, kwargs)), with_kwargs=True
                )
                yield part.register_forward_hook(lambda _, __, out, name=name: self._keep(name, "out", out))

    def _keep(self, name: str, kind: str, values: object) -> None:
        if not self.of.chunked:
            self.size = self.of.length
        elif name == "" and kind == "in":
            ids = next(x for x in tree_leaves(values) if isinstance(x, Tensor))
            self.start, self.size = self.start + self.size, ids.shape[1]
        if not self.start <= self.of.query < self.start + self.size:
            return
        tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
        self.events.append((name, kind, [at for x in tensors if (at := self._at_query(x)) is not None]))

    def _at_query(self, x: Tensor) -> Tensor | None:
        """What belongs to the query; None for a tensor without positions."""
        length, query, row = self.size, self.of.query - self.start, self.of.row
        if row is not None and x.dim() and x.shape[0] == self.of.rows:
            x = x[row : row + 1]
        dims = [d for d, size in enumerate(x.shape) if size == length]
        if not dims:
            return None
        if x.dim() > 2 and x.shape[-2] == x.shape[-1] == length > 1:  # attention weights (..., T, S)
            return x.detach().select(-2, query)[..., : query + 1].clone()
        usual = 1 if x.dim() == 3 else x.dim() - 2  # (B, T, C) and (B, H, T, D): other sizes may equal T by chance
        return x.detach().select(usual if usual in dims else dims[0], query).clone()


def _equal(a: Tensor, b: Tensor, exact: bool) -> bool:
    if exact or not a.numel():
        return torch.equal(a, b)
    scale = max(a.abs().max().item(), b.abs().max().item())
    return bool(((a - b).abs() <= RELATIVE_ROUNDING.get(a.dtype, 1e-5) * scale).all())


@contextlib.contextmanager
def removed_at_exit(hooks: list) -> Iterator[None]:
    """Removes the hooks, also after an exception."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
