"""Where a leak is: the output, the input that it depends on, and the submodule.

B batch, T positions, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tril.model.causality.claims import Claim, first_true, largest_change
from tril.model.causality.model import Model, tensors_in

ROUNDING, ROUNDING64 = 1e-5, 1e-11  # of the largest value: two computations of it

Event = tuple[str, str, list[Tensor]]  # name of a submodule, "in" or "out", values at the query


@torch.no_grad()
def locate(model: Model, claim: Claim, change: Tensor, bound: float) -> tuple[str, dict[str, Any]]:
    """The failure in words, and its fields in a `Result`.

    Args:
        change: (B, T), what the claim changes, somewhere by more than `bound`.
    """
    row, query = first_true(~(change <= bound))
    output, noun = model.nouns
    if not isinstance(claim.other, Tensor):
        return f"{output} {query} {claim.says}, by {change[row, query]:.2g}", {"query": query}

    def place(one: Tensor, other: Tensor, rows: tuple[int, int], query: int) -> str | None:
        pairs = zip((one, other), rows, strict=True)
        passes = [Pass(functools.partial(model, x, seed=claim.seed), i, *x.shape) for x, i in pairs]
        return first_difference(model.module, passes, query, exact=not bound)

    if claim.visible is None:
        name = place(claim.ids, claim.other, (row + len(claim.ids) - len(claim.other), row), query)
        key = {} if claim.other.shape[1] == claim.ids.shape[1] else {"key": claim.other.shape[1]}
        return f"{output} {query} {claim.says}{in_words(name)}", {"query": query, "place": name or ""} | key
    n = model.batch_size or 1  # a compiled function takes no single row
    one, other = (x[row : row + 1].repeat(n, 1) for x in (claim.ids, claim.other))
    same, length = model(one, seed=claim.seed), one.shape[1]
    effect = lambda other: largest_change(model(other, seed=claim.seed), same)[0].cpu()  # noqa: E731  (T,)
    assert claim.compared is not None  # a claim about hidden tokens says which outputs do not see them
    compared = claim.compared[row]
    alone = effect(other).masked_fill(~compared, 0.0)
    if len(claim.ids) > 1 and not alone.max() > bound:
        rest = torch.where((torch.arange(len(claim.ids)) == row)[:, None], claim.ids, claim.other)
        by_others = largest_change(model(rest, seed=claim.seed), claim.base(model))[row]
        if not by_others.max() > bound:
            return f"row {row} depends on its hidden tokens in a batch of {len(claim.ids)} only", {}
        name = place(claim.ids, rest, (row, row), int(by_others.argmax()))
        return f"row {row} depends on the other rows of its batch{in_words(name)}", {"place": name or ""}
    query = int((alone > bound if (alone > bound).any() else compared).nonzero()[0])

    # This output may see less than the one whose hidden tokens were replaced: the nearest input is the clearest.
    hidden = ~claim.visible[query] & (one == other)
    wider = torch.where(hidden, (one + 1) % model.vocab_size, other)
    other = wider if effect(wider)[query] > bound else other
    mixed = lambda keys: torch.where(torch.isin(torch.arange(length), keys), other, one)  # noqa: E731
    keys = (one != other)[0].nonzero().flatten()
    while len(keys) > 1:  # for as long as one half of the changed positions alone still leaks
        halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        if (smaller := next((half for half in halves if effect(mixed(half))[query] > bound), None)) is None:
            break
        keys = smaller
    # Effects of several inputs may cancel out at an earlier output, from which a later one depends on these.
    earlier = (effect(mixed(keys))[:query] > bound) & compared[:query]
    query, key = int(earlier.nonzero()[0]) if earlier.any() else query, int(keys[0])
    name = place(one, mixed(keys), (0, 0), query)
    inputs = f"{noun} {key}" if len(keys) == 1 else f"{noun}s {key} to {int(keys[-1])} together"
    outside = "" if key > query else ", outside of what it may see"
    where = f"{output} {query} depends on {inputs}{outside}{in_words(name)}"
    return where, {"query": query, "key": key, "place": name or ""}


class Pass(NamedTuple):
    """A pass over `rows` texts of `length` tokens, one row of which is compared."""

    run: Callable[[], object]
    row: int
    rows: int
    length: int


def first_difference(module: nn.Module | None, passes: Sequence[Pass], query: int, *, exact: bool) -> str | None:
    """Name of the first submodule with equal inputs and different outputs at the query.

    Args:
        passes: two.
        exact: equal means bit for bit; otherwise up to rounding.

    Returns:
        "" for the code of the module itself, None for a function, and where no submodule shows the difference.
    """
    if module is None or isinstance(module, torch.jit.ScriptModule):
        return None
    active: list[str] = []
    for (name, kind, values), (*event, others) in zip(*(trace(module, x, query) for x in passes), strict=False):
        pairs = [(a, b) for a, b in zip(values, others, strict=False) if a.shape == b.shape]
        if event != [name, kind] or not all(equal(a, b, exact) for a, b in pairs):
            owner, caller = name.rpartition(".")[0], active[-1] if active else ""
            skipped = owner.startswith(caller) and not isinstance(module.get_submodule(owner), nn.ModuleList)
            return name if kind == "out" else owner if skipped else caller
        if kind == "in":
            active.append(name)
        elif active:
            active.pop()
    return None


def trace(module: nn.Module, one: Pass, query: int) -> list[Event]:
    """What enters and leaves each submodule at the query, in the order of execution."""
    run, row, rows, length = one
    events: list[Event] = []

    def at_query(x: Tensor) -> Tensor | None:  # None for a tensor without positions
        x = x[row : row + 1] if rows > 1 and x.dim() and len(x) == rows else x
        dims = [d for d, size in enumerate(x.shape) if size == length]
        if not dims:
            return None
        if x.dim() > 2 and x.shape[-2] == x.shape[-1] == length > 1:  # attention weights (..., T, S)
            return x.detach().select(-2, query)[..., : query + 1].clone()
        usual = 1 if x.dim() == 3 else x.dim() - 2  # (B, T, C) and (B, H, T, D): other sizes may equal T by chance
        return x.detach().select(usual if usual in dims else dims[0], query).clone()

    def keep(name: str, kind: str, values: object) -> None:
        kept = [at_query(x) for x in tensors_in(values) if x.is_floating_point()]
        events.append((name, kind, [x for x in kept if x is not None]))

    with contextlib.ExitStack() as hooks:
        for name, part in module.named_modules():
            before = lambda _, args, kwargs, name=name: keep(name, "in", (args, kwargs))  # noqa: E731
            after = lambda _, __, outputs, name=name: keep(name, "out", outputs)  # noqa: E731
            with contextlib.suppress(RuntimeError):  # a ScriptModule takes no hooks
                hooks.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(part.register_forward_hook(after).remove)
        run()
    return events


def equal(a: Tensor, b: Tensor, exact: bool) -> bool:
    if exact or not a.numel():
        return torch.equal(a, b)
    scale = max(a.abs().max().item(), b.abs().max().item())
    return bool(((a - b).abs() <= (ROUNDING64 if a.dtype == torch.float64 else ROUNDING) * scale).all())


def in_words(place: str | None) -> str:
    """The end of a message; `place` as `first_difference` returns it."""
    return "" if place is None else f", first in {place or 'the code of the model itself'}"
