"""Sweeps with known truth: losses of arms, seeds and documents, and how often a comparison is wrong or finds something.

simulation_tables.py prints the tables of docs/ablations.md from them.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tril.model.intervals import block_starts
from tril.scripts.ablation.stages import stage_alpha
from tril.scripts.ablation.statistics import EQUAL, compare_arms, with_proposal

SEED_SD = 0.01  # of a run's loss, beyond what the seed changes for all arms: nats per token
# Tokens of the documents of the standard library's validation text, 2026-11-22: worth 28 documents of equal size
DOCUMENTS = np.array(
    """1290 730 7724 349 864 460 657 636 1308 6021 1671 2744 2429 26 661 306 12647 956 523 5141 3167 5407 5418 379
    426 1569 3807 8758 2516 7516 2091 2232 840 5520 1329 3618 3430 237 700 173 1168 1172 835 3537 13 329 101 921
    328 164 185 255 206 2797 2708 311 513 630 3074 4670 3930 11672 5044 3610 12398 2087 9054 66 66 16719 22095
    3482 656 1342 130 7231 411 448 142 5736 2882 2480 28350 6380 5601 534 347 46 1002""".split(),
    int,
)
WINDOW = 256  # tokens


@dataclass(frozen=True)
class Text:
    """Documents cut into windows: a piece is what one window and one document have in common.

    Attributes:
        window: (P,) window of each piece.
        document: (P,) document of each piece.
        tokens: (P,) length of each piece.
    """

    window: np.ndarray
    document: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, documents: np.ndarray, n_windows: int | None = None) -> "Text":
        """The text's first `n_windows` windows; None: the whole text."""
        ends = np.cumsum(documents)
        last = ends[-1] if n_windows is None else min(ends[-1], n_windows * WINDOW)
        cuts = np.unique(np.r_[0, ends[ends < last], np.arange(WINDOW, last, WINDOW), last])
        return cls(cuts[:-1] // WINDOW, np.searchsorted(ends, cuts[:-1], side="right"), np.diff(cuts))

    def sums(self, values: np.ndarray, group: np.ndarray) -> np.ndarray:
        """Sums of values (..., P) over the pieces of each group, (..., G)."""
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        return np.add.reduceat(values, starts, axis=-1)


@dataclass(frozen=True)
class Truth:
    """What a sweep is simulated from. Seeds change all arms alike by 0.1, documents by 0.5 nats.

    Attributes:
        effects: (A,) true loss of each arm; the first is the baseline.
        seed_sd: (A,) standard deviation between seeds of each arm.
        t_df: degrees of freedom of the distribution between seeds; None: normal.
        text: the pieces of the text.
        document_sd: standard deviation between documents of what an arm changes.
        run_sd: the same of what a run changes.
        token_sd: standard deviation between tokens.
    """

    effects: np.ndarray
    seed_sd: np.ndarray
    t_df: float | None = None
    text: Text = field(default_factory=lambda: Text.of(DOCUMENTS))
    document_sd: float = 0.0
    run_sd: float = 0.01
    token_sd: float = 0.1

    def losses(self, generator: np.random.Generator, n_seeds: int) -> np.ndarray:
        """Sums of losses of the pieces (A, S, P)."""
        n_arms, n_documents = len(self.effects), self.text.document.max() + 1
        by_run = generator.normal(size=(n_arms, n_seeds))
        if self.t_df is not None:
            by_run = generator.standard_t(self.t_df, size=by_run.shape) / np.sqrt(self.t_df / (self.t_df - 2))
        by_run = self.effects[:, None] + self.seed_sd[:, None] * by_run + 0.1 * generator.normal(size=n_seeds)
        by_document = (
            0.5 * generator.normal(size=(1, 1, n_documents))
            + self.document_sd * generator.normal(size=(n_arms, 1, n_documents))
            + self.run_sd * generator.normal(size=(n_arms, n_seeds, n_documents))
        )
        tokens = self.text.tokens
        noise = self.token_sd * np.sqrt(tokens) * generator.normal(size=(n_arms, n_seeds, len(tokens)))
        return (3 + by_run[..., None] + by_document[..., self.text.document]) * tokens + noise


def plain(n_arms: int = 6, difference: float = 0.0, ratio: float = 1.0, wide: int | None = None, **options) -> Truth:
    """Arms of equal variance, but that of the arm `wide`, `ratio` times as wide; the second differs by `difference`.

    The text has little to tell: 20 documents of equal size, which every arm finds equally hard.
    """
    seed_sd = np.full(n_arms, SEED_SD)
    if wide is not None:
        seed_sd[wide] *= ratio
    effects = np.zeros(n_arms)
    effects[1] = difference
    return Truth(effects, seed_sd, **{"text": EQUAL_TEXT, "run_sd": 0.0, "token_sd": 0.01} | options)


EQUAL_TEXT = Text.of(np.full(20, WINDOW))

Method = Callable[[Truth, np.ndarray], list]  # the truth, losses (A, S, P) -> comparison of each arm but the first


def now(truth: Truth, losses: np.ndarray, *, alpha: float = 0.05, margin: float | None = None) -> list:
    """The comparisons of this version, by documents, or by blocks of windows where there are fewer than 10."""
    text = truth.text
    group = text.document
    if text.document.max() + 1 < 10:
        windows = text.sums(text.tokens, text.window)
        group = (np.searchsorted(block_starts(windows), np.arange(len(windows)), side="right") - 1)[text.window]
    targets = text.sums(text.tokens, group)
    means = text.sums(losses, group) / targets
    baseline, *arms = ({seed: row for seed, row in enumerate(arm)} for arm in means)
    named = {str(number): arm for number, arm in enumerate(arms)}
    return list(compare_arms(named, baseline, targets, alpha=alpha, margin=margin).values())


def load_before(path: str) -> Method:
    """The comparisons of the file `path`, the statistics.py of an earlier version."""
    spec = importlib.util.spec_from_file_location("statistics_before", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["statistics_before"] = module
    spec.loader.exec_module(module)

    def before(truth: Truth, losses: np.ndarray) -> list:
        targets = truth.text.sums(truth.text.tokens, truth.text.window)
        means = truth.text.sums(losses, truth.text.window) / targets
        baseline, *arms = ({seed: row for seed, row in enumerate(arm)} for arm in means)
        return [module.compare(arm, baseline, targets, n_comparisons=len(arms)) for arm in arms]

    return before


@dataclass(frozen=True)
class Outcomes:
    """Comparisons of n simulated sweeps; all arrays are (n, A - 1).

    Attributes:
        p: corrected p values.
        sign: of the observed differences.
        truth: sign of the true differences, 0 for none.
        covered: the interval contains the true difference.
        equal: the verdict is "equal within the margin".
    """

    p: np.ndarray
    sign: np.ndarray
    truth: np.ndarray
    covered: np.ndarray
    equal: np.ndarray

    def family_error(self, alpha: float) -> float:
        """Share of sweeps with an arm called better or worse that is not, at level alpha."""
        return float(np.any((self.p < alpha) & (self.sign != self.truth), axis=1).mean())

    def found(self, alpha: float) -> float:
        """Share of sweeps whose second arm is rightly called better or worse, at level alpha."""
        return float(((self.p < alpha) & (self.sign == self.truth))[:, 0].mean())

    @property
    def coverage(self) -> float:
        """Share of the intervals, each by itself."""
        return float(self.covered.mean())


def simulate(truth: Truth, n_seeds: int, n_sweeps: int, method: Method | None = None, seed: int = 0) -> Outcomes:
    """Simulates sweeps; the same seed gives the same sweeps for every method (None: `now`)."""
    generator = np.random.default_rng(seed)
    effects = (truth.effects - truth.effects[0])[1:]
    found = [(method or now)(truth, truth.losses(generator, n_seeds)) for _ in range(n_sweeps)]
    intervals = np.array([[(each.difference.low, each.difference.high) for each in sweep] for sweep in found])
    return Outcomes(
        p=np.array([[each.p for each in sweep] for sweep in found]),
        sign=np.sign([[each.difference.mean for each in sweep] for sweep in found]),
        truth=np.broadcast_to(np.sign(effects), (n_sweeps, len(effects))),
        covered=(intervals[..., 0] <= effects) & (effects <= intervals[..., 1]),
        equal=np.array([[each.verdict == EQUAL for each in sweep] for sweep in found]),
    )


def follow_proposals(
    truth: Truth,
    method: Method | None,
    n_sweeps: int,
    *,
    first: int = 3,
    stages: int = 4,
    most: int = 24,
    seed: int = 0,
) -> tuple[float, float, float]:
    """Adds the proposed number of seeds until there is no proposal, at most `stages` times.

    Args:
        method: tests every stage at the same level; None: this version, whose stages have levels of their own.
        most: seeds in total.

    Returns:
        Shares of sweeps with a false verdict in some stage and with the second arm found in some stage; mean number of
        seeds.
    """
    generator, errors, found, used = np.random.default_rng(seed), 0, 0, 0
    effects = (truth.effects - truth.effects[0])[1:]
    for _ in range(n_sweeps):
        losses, n_seeds, wrong, right = truth.losses(generator, most), first, False, False
        for stage in range(1, stages + 1):
            if method is None:
                comparisons = now(truth, losses[:, :n_seeds], alpha=stage_alpha(stage))
                comparisons = [with_proposal(each, stage_alpha(stage + 1)) for each in comparisons]
            else:
                comparisons = method(truth, losses[:, :n_seeds])
            for each, effect in zip(comparisons, effects, strict=True):
                claimed = {"worse": 1, "better": -1}.get(each.verdict, 0)
                wrong |= claimed != 0 and claimed != np.sign(effect)
                right |= claimed != 0 and claimed == np.sign(effect)
            proposals = [each.more_seeds for each in comparisons if each.more_seeds]
            if not proposals or n_seeds == most or stage == stages:
                break
            n_seeds = min(most, n_seeds + min(proposals))
        errors, found, used = errors + wrong, found + right, used + n_seeds
    return errors / n_sweeps, found / n_sweeps, used / n_sweeps
