"""Every check is a claim: two computations give the same outputs.

B batch, T positions, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tril.model.causality.model import FIRST_SEED, Model


@dataclass(frozen=True)
class Result:
    """What a check of one state of the model showed.

    Attributes:
        check: "future", "equal", "gradient", "receptive field"; of a loss also "targets", "shift", "overlap".
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
