"""One combination of the certificate's grid, and what one check found in it.

B batch, T positions, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tril.model.causality.receptive_field import positions_to_test
from tril.model.causality.subject import Subject
from tril.model.generation.generate import inference

ODD = 37  # a length that is no multiple of any block
LONGEST = (
    256  # tokens of an input to a model that is not of this project: no longer one is tried, and nothing said about it
)
EOT = 0  # stands for end-of-text where documents are tested; no other place of the input has it
# Two computations of one function may differ by as much as each of them differs from the truth. That difference is measured, in float64,
# for every cell on the model at hand; twice the sum of both leaves room for inputs other than the one measured.
SLACK = 4
FEWEST = 8  # positions tested at one length, whatever they cost
LARGEST_LOGITS = 1 << 25  # elements held at once: 0.13 GB of float32


def lengths_to_test(longest: int, windows: Iterable[int | None] = ()) -> list[int]:
    """1, 2, an odd one, around each window, the longest."""
    around = [window + more for window in windows if window is not None for more in (0, 1)]
    return sorted({min(n, longest) for n in (1, 2, ODD, *around, longest)})


@dataclass(frozen=True)
class Result:
    """worst: the largest value that should be 0, or the smallest that should not; `tested` counts pairs of positions, or logits."""

    check: str
    cell: str
    length: int
    passed: bool
    worst: float
    bound: float
    tested: int
    where: str = ""


@dataclass
class Cell:
    """One combination of the grid.

    budget    FLOPs for the reach at one length; where all positions cost more they are sampled, see `positions_to_test`
    past      whether everything visible must have an effect (dropout may cut it, and large scores leave one key alone)
    function  whether decoding, padding and packing are compared too
    """

    subject: Subject
    labels: dict[str, object]
    lengths: Sequence[int]
    budget: float
    past: bool = True
    function: bool = True
    reach: dict[str, Tensor] = field(default_factory=dict)  # of the longest length, (T, T), nan where not tested
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    batch_size: int | None = None  # of every pass; None: what fits
    rounding: float | None = None  # None: measured when it is needed

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.labels.items())

    def positions(self, length: int) -> Tensor:
        """Those whose reach is tested at this length."""
        cost = 6 * self.subject.n_parameters() * length  # FLOPs of one forward and backward pass
        most = length if length * cost <= self.budget else max(FEWEST, int(self.budget / cost))
        return positions_to_test(length, most, self.generator).to(self.subject.device)

    def rows_at_once(self, length: int, most: int) -> int:
        """Rows of a batch that fit into memory, and on a CPU into its caches."""
        if self.batch_size is not None:
            return self.batch_size
        tokens = 4096 if self.subject.device.type == "cpu" else 1 << 17
        return max(1, min(most, tokens // length, LARGEST_LOGITS // (length * self.subject.vocab_size)))

    def tokens(self, *shape: int) -> Tensor:
        """Random ones, EOT never among them."""
        return torch.randint(1, self.subject.vocab_size, shape, generator=self.generator).to(self.subject.device)

    def other(self, ids: Tensor) -> Tensor:
        """Another token for every place, EOT never among them."""
        n = self.subject.vocab_size - 1
        return (ids - 1 + torch.randint(1, n, ids.shape, generator=self.generator).to(ids.device)) % n + 1

    def bound_of_hidden(self, noise: float) -> float:
        """How far logits may change when a hidden token does; `noise` is the largest difference of two runs of the same input.

        A weight of exactly 0 adds exactly nothing, in any kernel: of an `exact` subject no more than noise is to be explained.
        """
        return SLACK * noise if self.subject.exact else self.bound()

    def bound(self) -> float:
        """How far two computations of the same logits by different steps may lie apart."""
        if self.rounding is None:
            self.rounding = self.measured_rounding()
        return SLACK * self.rounding

    def measured_rounding(self) -> float:
        """Largest difference of the logits to those of float64, in evaluation mode; of a bare function, to its own at other batch sizes."""
        subject, ids = self.subject, self.tokens(1, max(self.lengths))
        with inference(list(subject.module.modules()) if subject.module else []):
            plain = subject.plain()
            exact = plain.in_float64()
            if exact is not None:
                return (plain(ids).to(exact.device).double() - exact(ids.to(exact.device))).abs().max().item()
            logits = subject(ids)
            floor = torch.finfo(logits.dtype).eps * logits.abs().max().item()
            return max([floor, *((subject(ids.expand(n, -1)) - logits).abs().max().item() for n in (1, 2, 5))])

    def result(
        self, check: str, length: int, worst, bound: float, tested: int, passed: bool, where: str = ""
    ) -> Result:
        return Result(
            check, self.name, length, bool(passed), float(worst), float(bound), int(tested), "" if passed else where
        )
