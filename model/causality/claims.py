"""Every check is a claim: two computations give the same outputs. Where they do not, `locate` finds the leak.

B batch, T positions, V vocabulary.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tril.model.causality.model import FIRST_SEED, Model, tensors_in

ROUNDING, ROUNDING64 = 1e-5, 1e-11  # of the largest value: two computations of it, in float32 and in float64


@dataclass(frozen=True)
class Result:
    """What a check of one state of the model showed.

    Attributes:
        check: "future", "equal", "gradient", "receptive field"; of a loss also "targets", "shift".
        variant: the state, in words.
        length: of the text with the largest difference.
        worst: the largest value that should be 0, or the smallest that should not be.
        tested: number of compared outputs or pairs of positions.
        where: the first failure in words; empty if the check passed.
        undecided: a difference that may be rounding or a small leak; empty for none.
        query, key: positions of the first failure, where it has them.
        place: name of the submodule whose input is clean and whose output is not.
    """

    check: str
    variant: str
    length: int
    worst: float
    bound: float
    tested: int
    where: str = ""
    undecided: str = ""
    query: int | None = None
    key: int | None = None
    place: str = ""

    @property
    def passed(self) -> bool:
        return not self.where


class Claim(NamedTuple):
    """The outputs of `ids` equal those of `other`: of another text, or computed in another way.

    Attributes:
        check: as in `Result`.
        base: model -> the outputs of `ids` (B, T, *), which claims about one text share.
        other: ids of another pass, whose rows are the last ones and whose positions the first; or model -> outputs,
            nan where it computes none.
        compared: bool (B, T), the outputs that must be equal; None: all.
        visible: bool (T, T), what each output sees, where only tokens differ that the compared outputs do not see.
        says: the failure in words, behind the name of the output.
        seed: of the random numbers of both passes.
    """

    check: str
    ids: Tensor
    base: Callable[[Model], Tensor]
    other: Tensor | Callable[[Model], Tensor]
    compared: Tensor | None = None
    visible: Tensor | None = None
    says: str = ""
    seed: int = FIRST_SEED

    @torch.no_grad()
    def change(self, model: Model) -> Tensor:
        """The largest difference at each position, (rows, positions) of the other pass; 0 where none is compared."""
        other = model(self.other, seed=self.seed) if isinstance(self.other, Tensor) else self.other(model)
        rows, length, size = other.shape
        base = self.base(model)[-rows:, :length, :size]
        change = largest_change(other, base)
        if not isinstance(self.other, Tensor):
            change = change.masked_fill(other.isnan().all(-1) & ~base.isnan().all(-1), 0.0)
        if self.compared is not None:
            change = change.masked_fill(~self.compared[-rows:, :length].to(change.device), 0.0)
        return change


def once(ids: Tensor, seed: int = FIRST_SEED) -> Callable[[Model], Tensor]:
    """model -> the outputs of `ids`, computed once for each model."""
    return functools.cache(lambda model: model(ids, seed=seed).detach())


def largest_change(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference of outputs (..., V) at each position, (...); nan or the same infinity in both is none."""
    if torch.equal(a, b):  # one pass over the memory instead of ten; false for nan
        return a.new_zeros(a.shape[:-1])
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).detach().abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf).amax(-1)


def first_true(wrong: Tensor) -> list[int]:
    """Index of the first True; empty if there is none."""
    return torch.nonzero(wrong)[:1].flatten().tolist()


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

    def begins(ids: Tensor, other: Tensor, rows: tuple[int, int], query: int) -> tuple[str, str]:
        """The end of the message, and the name of the submodule."""
        events = (trace(model, x, r, query, claim.seed) for x, r in zip((ids, other), rows, strict=True))
        place = first_difference(model, *events, exact=not bound)
        return "" if place is None else f", first in {place or 'the code of the model itself'}", place or ""

    if claim.visible is None:
        rows = row + len(claim.ids) - len(claim.other), row
        words, place = begins(claim.ids, claim.other, rows, query)
        key = {} if claim.other.shape[1] == claim.ids.shape[1] else {"key": claim.other.shape[1]}
        return f"{output} {query} {claim.says}{words}", {"query": query, "place": place} | key

    n = model.batch_size or 1  # a compiled function takes no single row
    one, other = (x[row : row + 1].repeat(n, 1) for x in (claim.ids, claim.other))
    same = model(one, seed=claim.seed)
    changed = lambda other: largest_change(model(other, seed=claim.seed), same)[0].cpu() > bound  # noqa: E731  (T,)
    assert claim.compared is not None  # a claim about hidden tokens says which outputs do not see them
    alone = changed(other) & claim.compared[row]
    if len(claim.ids) > 1 and not alone.any():
        rest = torch.where((torch.arange(len(claim.ids)) == row)[:, None], claim.ids, claim.other)
        by_others = largest_change(model(rest, seed=claim.seed), claim.base(model))[row]
        if not by_others.max() > bound:
            return f"row {row} depends on its hidden tokens in a batch of {len(claim.ids)} only", {}
        words, place = begins(claim.ids, rest, (row, row), int(by_others.argmax()))
        return f"row {row} depends on the other rows of its batch{words}", {"place": place}

    query = first_true(alone if alone.any() else claim.compared[row])[0]
    # This output may see less than the one whose hidden tokens were replaced: the nearest input is the clearest.
    wider = torch.where(~claim.visible[query] & (one == other), (one + 1) % model.vocab_size, other)
    other = wider if changed(wider)[query] else other
    keys = (one != other)[0].nonzero().flatten().tolist()
    if not keys:  # the last output sees all tokens
        return f"{output} {query} depends on earlier calls", {"query": query}
    replaced = lambda key: torch.where(torch.arange(one.shape[1]) == key, other, one)  # noqa: E731
    key = next((key for key in keys if changed(replaced(key))[query]), None)
    if key is not None:  # effects of several inputs may cancel out at an earlier output, from which this one depends
        other = replaced(key)
        query = min([*first_true(changed(other) & claim.compared[row]), query])
    words, place = begins(one, other, (0, 0), query)
    inputs = f"{noun} {key}" if key is not None else f"{noun}s {keys[0]} to {keys[-1]} together"
    key = keys[0] if key is None else key
    outside = "" if key > query else ", outside of what it may see"
    return f"{output} {query} depends on {inputs}{outside}{words}", {"query": query, "key": key, "place": place}


Event = tuple[str, str, list[Tensor]]  # name of a submodule, "in" or "out", values at the query


def first_difference(model: Model, events: list[Event], others: list[Event], *, exact: bool) -> str | None:
    """Name of the first submodule with equal inputs and different outputs in the events of two passes.

    Args:
        exact: equal means bit for bit; otherwise up to rounding.

    Returns:
        "" for the code of the module itself, None for a function, and where no submodule shows the difference.
    """

    def equal(a: Tensor, b: Tensor) -> bool:
        if exact or not a.numel():
            return torch.equal(a, b)
        rounding = ROUNDING64 if a.dtype == torch.float64 else ROUNDING
        return bool(((a - b).abs() <= rounding * max(a.abs().max(), b.abs().max())).all())

    module, active = model.module, []  # active: submodules that have not returned
    for (name, kind, values), (*event, other_values) in zip(events, others, strict=False):
        pairs = [(a, b) for a, b in zip(values, other_values, strict=False) if a.shape == b.shape]
        if event != [name, kind] or not all(equal(a, b) for a, b in pairs):
            assert module is not None  # a function has no events
            owner, caller = name.rpartition(".")[0], active[-1] if active else ""
            skipped = owner.startswith(caller) and not isinstance(module.get_submodule(owner), nn.ModuleList)
            return name if kind == "out" else owner if skipped else caller
        if kind == "in":
            active.append(name)
        elif active:
            active.pop()
    return None


def trace(model: Model, ids: Tensor, row: int, query: int, seed: int) -> list[Event]:
    """What enters and leaves each submodule at the query of a row, in the order of execution; none of a function."""
    events: list[Event] = []
    rows, length = ids.shape
    if model.module is None or isinstance(model.module, torch.jit.ScriptModule):  # which takes no hooks
        return events

    def at_query(tensors: list[Tensor]) -> Iterator[Tensor]:
        """Of tensors with positions."""
        for x in tensors:
            x = x.detach()
            x = x[row : row + 1] if rows > 1 and x.dim() and len(x) == rows else x
            dims = [d for d, size in enumerate(x.shape) if size == length]
            is_square = x.dim() > 2 and x.shape[-2] == x.shape[-1] == length > 1
            if x.is_floating_point() and is_square:  # attention weights (..., T, S)
                yield x.select(-2, query)[..., : query + 1].clone()
            elif x.is_floating_point() and dims:
                usual = 1 if x.dim() == 3 else x.dim() - 2  # (B, T, C) and (B, H, T, D): other sizes may equal T
                yield x.select(usual if usual in dims else dims[0], query).clone()

    def keep(name: str, kind: str, values: object) -> None:
        events.append((name, kind, list(at_query(tensors_in(values)))))

    with contextlib.ExitStack() as hooks:
        for name, part in model.module.named_modules():
            before = lambda _, args, kwargs, name=name: keep(name, "in", (args, kwargs))  # noqa: E731
            after = lambda _, __, outputs, name=name: keep(name, "out", outputs)  # noqa: E731
            with contextlib.suppress(RuntimeError):  # a ScriptModule takes no hooks
                hooks.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(part.register_forward_hook(after).remove)
        model(ids, seed=seed)
    return events
