"""Where a leak is: the output, the input that it depends on, and the submodule.

B batch, T positions, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tril.model.causality.model import Model, tensors_in

RELATIVE_ROUNDING = {torch.float64: 1e-11}  # of two ways to compute the same values; 1e-5 in lower precisions

Event = tuple[str, str, list[Tensor]]  # name of a submodule, "in" or "out", values at the query


def find_leak(
    model: Model, ids: Tensor, changed: Tensor, compared: Tensor, limit: float, seed: int
) -> tuple[str, dict[str, Any]]:
    """The first leak in words, and its fields in a `Result`.

    Args:
        ids, changed: two batches (B, T) whose compared outputs, bool (B, T), should be equal up to `limit`.
    """

    def effect(ids: Tensor, changed: Tensor) -> Tensor:  # (B, T)
        return largest_change(model(changed, seed=seed), model(ids, seed=seed)).cpu()

    def place(ids: Tensor, changed: Tensor, row: int, query: int) -> str | None:
        passes = [Pass(lambda x=x: model(x, seed=seed), query, x.shape[1], row, len(x)) for x in (ids, changed)]
        return first_difference(model.module, *passes, exact=not limit)

    row = int(effect(ids, changed).masked_fill(~compared, 0.0).amax(1).argmax())
    one, other, outputs = ids[row : row + 1], changed[row : row + 1], compared[row]
    if model.batch_size:  # a compiled function takes no single row
        one, other = (text.repeat(model.batch_size, 1) for text in (one, other))
    alone = effect(one, other)[0].masked_fill(~outputs, 0.0)  # (T,)
    if len(ids) > 1 and not alone.max() > limit:
        rest = changed.clone()
        rest[row] = ids[row]
        by_others = effect(ids, rest)[row]  # (T,)
        if not by_others.max() > limit:
            return f"row {row} depends on its hidden tokens in a batch of {len(ids)} only", {}
        name = place(ids, rest, row, int(by_others.argmax()))
        return f"row {row} depends on the other rows of its batch{in_words(name)}", {"place": name or ""}
    query = int((alone > limit if (alone > limit).any() else outputs).nonzero()[0])

    # This output may see less than the one whose hidden tokens were replaced: the nearest input is the clearest.
    hidden = ~model.visible(one.shape[1])[query] & (one == other)
    wider = torch.where(hidden, (one + 1) % model.vocab_size, other)
    other = wider if effect(one, wider)[0, query] > limit else other

    def mixed(keys: Tensor) -> Tensor:
        text = one.clone()
        text[:, keys] = other[:, keys]
        return text

    keys = (one != other)[0].nonzero().flatten()
    keys = smallest_cause(keys, lambda keys: bool(effect(one, mixed(keys))[0, query] > limit))
    # Effects of several inputs may cancel out at an earlier output, from which a later one depends on these.
    earlier = (effect(one, mixed(keys))[0, :query] > limit) & outputs[:query]
    query = int(earlier.nonzero()[0]) if earlier.any() else query
    name = place(one, mixed(keys), 0, query)
    output, noun = model.nouns
    at = f"{noun} {int(keys[0])}" if len(keys) == 1 else f"{noun}s {int(keys.min())} to {int(keys.max())} together"
    outside = "" if int(keys[0]) > query else ", outside of what it may see"
    where = f"{output} {query} depends on {at}{outside}{in_words(name)}"
    return where, {"query": query, "key": int(keys[0]), "place": name or ""}


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
    """A pass over a batch of `rows` texts of `length` tokens, of which the position `query` of one row is compared."""

    run: Callable[[], object]
    query: int
    length: int
    row: int = 0
    rows: int = 1

    def at_query(self, x: Tensor) -> Tensor | None:
        """What belongs to the query; None for a tensor without positions."""
        if self.rows > 1 and x.dim() and x.shape[0] == self.rows:
            x = x[self.row : self.row + 1]
        dims = [d for d, size in enumerate(x.shape) if size == self.length]
        if not dims:
            return None
        if x.dim() > 2 and x.shape[-2] == x.shape[-1] == self.length > 1:  # attention weights (..., T, S)
            return x.detach().select(-2, self.query)[..., : self.query + 1].clone()
        usual = 1 if x.dim() == 3 else x.dim() - 2  # (B, T, C) and (B, H, T, D): other sizes may equal T by chance
        return x.detach().select(usual if usual in dims else dims[0], self.query).clone()

    def trace(self, module: nn.Module) -> list[Event]:
        """What enters and leaves each submodule at the query, in the order of execution."""
        events: list[Event] = []

        def keep(name: str, kind: str, values: object) -> None:
            tensors = [self.at_query(x) for x in tensors_in(values) if x.is_floating_point()]
            events.append((name, kind, [x for x in tensors if x is not None]))

        hooks = []
        with removed_at_exit(hooks):
            for name, part in module.named_modules():
                before = lambda _, args, kwargs, name=name: keep(name, "in", (args, kwargs))  # noqa: E731
                after = lambda _, __, outputs, name=name: keep(name, "out", outputs)  # noqa: E731
                with contextlib.suppress(RuntimeError):  # a ScriptModule takes no hooks
                    hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
                    hooks.append(part.register_forward_hook(after))
            self.run()
        return events


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
    active: list[str] = []
    for (name, kind, values), (*event, others) in zip(one.trace(module), other.trace(module), strict=False):
        pairs = [(a, b) for a, b in zip(values, others, strict=False) if a.shape == b.shape]
        if event != [name, kind] or not all(_equal(a, b, exact) for a, b in pairs):
            owner, caller = name.rpartition(".")[0], active[-1] if active else ""
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
