"""One case of the certificate's grid, and the result of one check of it.

B batch, T positions, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tril.model.causality.receptive_field import positions_to_test
from tril.model.causality.subject import Subject
from tril.model.generation.generate import inference

ODD_LENGTH = 37  # not a multiple of any block size
MAX_LENGTH = 256  # longest input to a model of another project; the certificate says nothing about longer ones
EOT = 0  # end-of-text token of the document checks; it occurs nowhere else in an input
# Two computations of one function may differ by as much as each of them differs from the exact value. Each case
# measures that difference in float64 on its own model; twice the sum of both leaves room for other inputs than the
# measured one.
SLACK = 4
MIN_POSITIONS = 8  # positions tested at one length, at any cost
MAX_LOGITS = 1 << 25  # elements in memory at once: 0.13 GB of float32


def lengths_to_test(context_length: int, windows: Iterable[int | None] = ()) -> list[int]:
    """1, 2, an odd length, lengths around each window, and the context length."""
    around = [window + extra for window in windows if window is not None for extra in (0, 1)]
    return sorted({min(n, context_length) for n in (1, 2, ODD_LENGTH, *around, context_length)})


@dataclass(frozen=True)
class Result:
    """Result of one check of one case at one length.

    Attributes:
        worst: the largest value that should be 0, or the smallest that should not be.
        tested: number of pairs of positions, or of logits.
        where: the first failure in words; empty if the check passed.
    """

    check: str
    case: str
    length: int
    passed: bool
    worst: float
    bound: float
    tested: int
    where: str = ""


@dataclass
class Case:
    """One combination of the grid.

    Attributes:
        budget: FLOPs of one dependency matrix; if all positions cost more, a sample is tested, see `positions_to_test`.
        full_past: every visible input must have an effect. Not with dropout, which may remove it, nor with large
            scores, which leave weight on one key only.
        equivalence: compare decoding, padding and packed documents with the full pass.
        dependencies: at the longest length, (T, T) each, NaN where not tested.
        batch_size: of every pass; None: what fits into memory.
        rounding: None: measured on first use.
    """

    subject: Subject
    labels: dict[str, object]
    lengths: Sequence[int]
    budget: float
    full_past: bool = True
    equivalence: bool = True
    dependencies: dict[str, Tensor] = field(default_factory=dict)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    batch_size: int | None = None
    rounding: float | None = None

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.labels.items())

    def positions(self, length: int) -> Tensor:
        """The positions whose dependencies are tested at this length."""
        cost = 6 * self.subject.n_parameters() * length  # FLOPs of one forward and backward pass
        limit = length if length * cost <= self.budget else max(MIN_POSITIONS, int(self.budget / cost))
        return positions_to_test(length, limit, self.generator).to(self.subject.device)

    def rows_per_batch(self, length: int, limit: int) -> int:
        """Rows of a batch that fit into memory, and on a CPU into its caches."""
        if self.batch_size is not None:
            return self.batch_size
        tokens = 4096 if self.subject.device.type == "cpu" else 1 << 17
        return max(1, min(limit, tokens // length, MAX_LOGITS // (length * self.subject.vocab_size)))

    def random_tokens(self, *shape: int) -> Tensor:
        """Random tokens, none of them EOT."""
        return torch.randint(1, self.subject.vocab_size, shape, generator=self.generator).to(self.subject.device)

    def other_tokens(self, ids: Tensor) -> Tensor:
        """A different token at every position, none of them EOT."""
        n = self.subject.vocab_size - 1
        return (ids - 1 + torch.randint(1, n, ids.shape, generator=self.generator).to(ids.device)) % n + 1

    def hidden_bound(self, noise: float) -> float:
        """How far logits may change with a hidden token.

        A weight of exactly 0 adds exactly nothing in any kernel, so an `exact` subject may change by noise only.

        Args:
            noise: the largest difference between two runs of the same input.
        """
        return SLACK * noise if self.subject.exact else self.bound()

    def bound(self) -> float:
        """How far two computations of the same logits by different steps may differ."""
        if self.rounding is None:
            self.rounding = self.measured_rounding()
        return SLACK * self.rounding

    def measured_rounding(self) -> float:
        """Largest difference between the logits and those of float64, in evaluation mode.

        Without float64: the largest difference between the logits of one input at several batch sizes.
        """
        subject, ids = self.subject, self.random_tokens(1, max(self.lengths))
        with inference(list(subject.module.modules()) if subject.module else []):
            plain = subject.plain()
            exact = plain.float64_logits(ids)
            if exact is not None:
                return (plain(ids).to(exact.device).double() - exact).abs().max().item()
            logits = subject(ids)
            floor = torch.finfo(logits.dtype).eps * logits.abs().max().item()
            return max([floor, *((subject(ids.expand(n, -1)) - logits).abs().max().item() for n in (1, 2, 5))])

    def result(self, check: str, length: int, worst: float, bound: float, tested: int, where: str) -> Result:
        """A result that fails if `where` says so."""
        return Result(check, self.name, length, not where, worst, bound, tested, where)


def first_true(wrong: Tensor) -> list[int]:
    """Index of the first True; empty if there is none."""
    return torch.nonzero(wrong)[:1].flatten().tolist()
