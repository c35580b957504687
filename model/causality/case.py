"""One case of the certificate's grid, and the result of one check of it.

B batch, T positions, V vocabulary.
"""

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tril.model.causality.receptive_field import positions_to_test
from tril.model.causality.subject import Subject
from tril.model.causality.texts import Texts
from tril.model.generation.generate import inference

ODD_LENGTH = 37  # not a multiple of any block size
MAX_LENGTH = 256  # longest input to a model of another project; the certificate says nothing about longer ones
EOT = 0  # end-of-text token of the document checks; it occurs nowhere else in an input
# Two computations of one function may differ by as much as each of them differs from the exact value. Each case
# measures that difference in float64 on its own model; twice the sum of both leaves room for other inputs than the
# measured one.
SLACK = 4
UNITS = 16  # units in the last place of the largest logit: the rounding of a function that does not run in float64
FLOAT64_ROUNDING = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps  # relative to that of float32
ROUNDED_TEXTS = 4  # whose rounding is measured, at most
FLOAT64_SLACK = 1000  # some inputs round worse than the measured one; leaks are far larger still
# A function that differs more from its float64 twin is another function there, and its bound would hide a leak.
MAX_RELATIVE_ROUNDING, MAX_RELATIVE_LOW_PRECISION = 1e-3, 0.1
MAX_RELATIVE_NOISE = 1e-4  # of the largest logit: two runs of one input that differ more are not repeatable
LONGEST_REDRAW_BUDGET, REDRAW_BUDGET = 5e10, 4e9  # FLOPs of the replaced texts at the longest length, at another one
MAX_ROWS = 512  # texts that are replaced at one length
MIN_POSITIONS = 8  # positions tested at one length, at any cost
MAX_LOGITS = 1 << 25  # elements in memory at once: 0.13 GB of float32


def lengths_to_test(context_length: int, windows: Iterable[int | None] = ()) -> list[int]:
    """1, 2, an odd length, lengths around each window, and the context length."""
    around = [window + extra for window in windows if window is not None for extra in (0, 1)]
    return sorted({min(n, context_length) for n in (1, 2, ODD_LENGTH, *around, context_length)})


class ModelError(ValueError):
    """The model under test raises an exception; its own is the cause."""


def structural_lengths(longest: int) -> list[int]:
    """Lengths at which implementations change: small ones, multiples of 8 and 64 and their neighbours, and others."""
    blocks = [
        n * size + side for size, n_max in ((8, 6), (64, 8), (512, 8)) for n in range(n_max + 1) for side in (-1, 0, 1)
    ]
    others = (2, 3, 5, 24, 37, 72, 100, 113, 144, 150, 300)
    return sorted({n for n in (*blocks, *others, longest - 1, longest) if 1 <= n <= longest})


@dataclass(frozen=True)
class Result:
    """Result of one check of one case at one length.

    Attributes:
        worst: the largest value that should be 0, or the smallest that should not be.
        tested: number of pairs of positions, or of logits.
        where: the first failure in words; empty if the check passed.
        query, key: positions of the first failure, where it has them; `layer` and `head` for attention weights.
        place: name of the submodule whose input is clean and whose output is not.
    """

    check: str
    case: str
    length: int
    passed: bool
    worst: float
    bound: float
    tested: int
    where: str = ""
    query: int | None = None
    key: int | None = None
    layer: int | None = None
    head: int | None = None
    place: str = ""


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
        redrawn: further lengths at which all hidden tokens are replaced, or cut off.
        rows: texts at each length, at most.
        inexact: a hidden token has changed a logit, if only by rounding. maps: test pairs of positions too.
        single_tokens: change tokens one by one too, where gradients show the same pairs.
        max_gradients: outputs whose gradients are computed at one length, at most; None: as the budget allows.
        generation: compare generated tokens with a loop of full passes.
        rounding: None: measured on first use. `float32_rounding`: of the largest logit; `known_rounding`: of float32.
        noise: largest difference between two runs of the same input; `scale` is the largest logit of them.
        undecided: a difference that may be rounding or a small leak.
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
    redrawn: Sequence[int] = ()
    rows: int = MAX_ROWS
    inexact: bool = False
    scale: float = 0.0
    maps: bool = True
    single_tokens: bool = True
    max_gradients: int | None = None
    generation: bool = False
    rounding: float | None = None
    noise: float = 0.0
    float32_rounding: float | None = None
    known_rounding: float = 0.0
    undecided: str = ""

    def __post_init__(self) -> None:
        self.texts = Texts(self.subject.vocab_size, self.subject.special, self.generator)

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.labels.items())

    def positions(self, length: int, limit: int | None = None) -> Tensor:
        """The positions whose dependencies are tested at this length, at most `limit`."""
        cost = 3 * self.subject.cost(length)  # FLOPs of one forward and backward pass
        affordable = length if length * cost <= self.budget else max(MIN_POSITIONS, int(self.budget / cost))
        return positions_to_test(length, min(affordable, limit or length), self.generator).to(self.subject.device)

    def redrawn_rows(self, length: int) -> int:
        """Number of queries whose hidden tokens are replaced at this length."""
        longest = length == max(self.lengths)
        cost = 2 * self.subject.cost(length)  # FLOPs of two forward passes
        affordable = int((LONGEST_REDRAW_BUDGET if longest else REDRAW_BUDGET) / cost) if cost else MAX_ROWS
        if math.isinf(self.budget):
            return length
        return max(2, min(length, affordable, self.rows, MAX_ROWS if longest else MAX_ROWS // 8))

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

    def queries(self, visible: Tensor, limit: int) -> Tensor:
        """At most `limit` queries with hidden keys; `visible` is bool (T, T)."""
        chosen = positions_to_test(len(visible), limit, self.generator)
        return chosen[~visible.cpu()[chosen].all(-1)]

    @property
    def trains(self) -> bool:
        """Whether passes record gradients: torch has other kernels for training."""
        return self.subject.differentiable and self.subject.module is not None and self.subject.module.training

    @functools.cached_property
    def float64(self) -> Subject | None:
        """The same function in float64, where it runs in float64."""
        try:
            exact = self.subject.plain().in_float64()
            if exact is None or not exact(self.random_tokens(1, max(self.lengths))).isfinite().all():
                return None
        except Exception as error:  # code of other projects may raise anything
            reason = one_line(error.__cause__ or error)
            self.subject.note = f"float64 is left out ({reason}); bounds follow from float32"
            return None
        return exact

    def judge(
        self, change: Callable[[Subject], Tensor], measured: Tensor, *, exact: bool
    ) -> tuple[float, float, Subject]:
        """How far logits differ that should be equal, how far they may, and the subject that shows it.

        Differences of rounding size are computed again in float64, where a leak stays and rounding disappears.

        Args:
            change: the difference of two computations by a subject.
            measured: the same of the subject of this case.
            exact: equal to the bit, up to the noise of the subject.
        """
        worst = measured.abs().max().item()
        if exact or worst == 0:
            return worst, self.exact_bound(self.noise), self.subject
        if self.float64 is not None:
            precise, limit = change(self.float64).abs().max().item(), self.float64_bound()
            if not precise <= limit:
                return precise, limit, self.float64
        elif worst <= self.bound():
            self.undecided = f"outputs differ by {worst:.1g}, which may be rounding: the model does not run in float64"
        return worst, self.bound(), self.subject

    def hidden_bound(self, noise: float) -> float:
        """How far logits may change with a hidden token.

        A weight of exactly 0 adds exactly nothing in any kernel, so an `exact` subject may change by noise only.

        Args:
            noise: the largest difference between two runs of the same input.
        """
        return self.exact_bound(noise) if self.subject.exact else self.bound()

    def exact_bound(self, noise: float) -> float:
        """How far equal computations may differ; in low precision, those of experts round by the other tokens."""
        if noise or self.subject.precision in ("32-true", "64-true") or not self.mixes_rounding:
            return SLACK * noise
        return 2 * torch.finfo(torch.bfloat16).eps * self.scale

    @functools.cached_property
    def mixes_rounding(self) -> bool:
        """Whether other rows of a batch change the logits of a text, if only by rounding."""
        ids = self.texts.draw(self.batch_size or 4, max(self.lengths)).to(self.subject.device)
        with torch.set_grad_enabled(self.trains):
            alone = self.subject(ids)[0]
            others = [self.texts.draw(*ids.shape).to(ids.device) for _ in range(4)]
            changed = [self.subject(torch.cat([ids[:1], rows[1:]]))[0] for rows in others]
        return any(not torch.equal(alone, logits) for logits in changed)

    def bound(self) -> float:
        """How far two computations of the same logits by different steps may differ."""
        if self.rounding is None:
            self.rounding = self.measured_rounding()
        return SLACK * self.rounding

    def float64_bound(self) -> float:
        """The same bound in float64, with room for the inputs on which roundings are larger."""
        if self.float32_rounding is None:
            self.measured_rounding()
        assert self.float32_rounding is not None
        return FLOAT64_ROUNDING * max(FLOAT64_SLACK * self.float32_rounding, 10 * SLACK * self.known_rounding)

    def measured_rounding(self) -> float:
        """Largest difference between the logits and those of float64, in evaluation mode.

        Without float64: a few units in the last place of the largest logit. It is limited, because a function that
        differs more from its float64 twin is another function there.
        """
        subject, length = self.subject, max(self.lengths)
        ids = self.random_tokens(min(ROUNDED_TEXTS, self.rows_per_batch(length, ROUNDED_TEXTS)), length)
        twin = self.float64  # made outside of inference mode, since gradients of it are computed too
        with inference(list(subject.module.modules()) if subject.module else []):
            plain = subject.plain()
            logits = plain(ids)
            scale = logits.abs().max().item()
            self.float32_rounding = torch.finfo(torch.float32).eps * scale
            if twin is None:
                return UNITS * torch.finfo(logits.dtype).eps * scale
        with inference(list(twin.module.modules()) if twin.module else []):
            rounding = (logits.to(twin.device).double() - twin(ids)).abs().max().item()
        low = subject.precision not in ("32-true", "64-true")
        if not low:
            self.known_rounding = min(rounding, MAX_RELATIVE_ROUNDING * scale)
        return min(rounding, (MAX_RELATIVE_LOW_PRECISION if low else MAX_RELATIVE_ROUNDING) * scale)

    def result(
        self, check: str, length: int, worst: float, bound: float, tested: int, where: str, **leak: Any
    ) -> Result:
        """A result that fails if `where` says so; `leak` are further fields of it."""
        return Result(check, self.name, length, not where, worst, bound, tested, where, **leak)


def largest_change(a: Tensor, b: Tensor) -> Tensor:
    """Largest difference of logits (..., V) at each output, (...); nan in both is none, nan in one is infinite."""
    if torch.equal(a, b):  # one pass over the memory instead of ten; false for nan
        return a.new_zeros(a.shape[:-1])
    both = a.isnan() & b.isnan()
    return (a - b).detach().abs().masked_fill(both, 0.0).nan_to_num(nan=torch.inf).amax(-1)


def first_true(wrong: Tensor) -> list[int]:
    """Index of the first True; empty if there is none."""
    return torch.nonzero(wrong)[:1].flatten().tolist()


def one_line(error: BaseException) -> str:
    """The exception in at most 200 characters."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
