"""What the pairs so far allow to conclude, and whether more of them are trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tril.model.comparison import BETTER, EQUAL, MAX_PAIRS, WORSE, Bound, Comparison, compare
from tril.scripts.cli.formats import clock, plural
from tril.scripts.experiments.losses import NATS, Losses, losses_of
from tril.scripts.experiments.sweep import Run, Sweep, Variant, scored_part
from tril.scripts.trials.pair_runs import WALL_SECONDS

SAME_BYTES = 1e-6  # relative: rounding of bytes per token
VERDICTS = {BETTER: "better", WORSE: "worse", EQUAL: "equal"}


@dataclass(frozen=True)
class Rules:
    """When to stop.

    Attributes:
        margin: differences below it count as equal.
        seconds: that may be spent on all pairs.
        pairs: that may be trained.
    """

    margin: float
    seconds: float
    pairs: int


@dataclass(frozen=True)
class Decision:
    """The state after n pairs.

    Attributes:
        verdict: "better", "worse", "equal" or "undecided"; None: train another pair.
        reason: why there is this verdict, a sentence; may be empty.
        looks: one for each pair, in their order; none if a loss is not finite.
        seconds: of each pair, with the start of its processes.
        losses: of both arms, the baseline first; None without a pair.
    """

    verdict: str | None
    reason: str
    looks: list[Comparison]
    seconds: list[float]
    losses: Losses | None

    @property
    def means(self) -> np.ndarray:
        """(2, n) mean losses of the baseline's and the candidate's runs."""
        assert self.losses is not None
        return self.losses.losses @ self.losses.sizes / self.losses.sizes.sum()


def decide(baseline: Sequence[Run], candidate: Sequence[Run], rules: Rules) -> Decision:
    """The decision after the pairs of finished runs, n of each arm, with the same seeds.

    Raises:
        ValueError: the arms have other validation texts.
    """
    seconds = [sum(float(run.planned[WALL_SECONDS]) for run in pair) for pair in zip(baseline, candidate, strict=True)]
    if not seconds:
        return Decision(None, "", [], seconds, None)
    scored_part([*baseline, *candidate])
    first, second = Variant({}, "baseline", tuple(baseline)), Variant({}, "candidate", tuple(candidate))
    losses = losses_of(Sweep(Path(), (), (first, second), first))
    if losses.unit != NATS:
        check_same_text(baseline[0], candidate[0])
    bad = {arm.label: [str(run.seed) for run in arm.runs if run.diverged] for arm in (second, first)}
    if any(bad.values()):
        parts = [f"the {name} with seed {', '.join(seeds)}" for name, seeds in bad.items() if seeds]
        verdict = "undecided" if bad["baseline"] else "worse"
        return Decision(verdict, f"The loss of {' and of '.join(parts)} is not finite.", [], seconds, losses)
    looks = [
        compare(losses.losses[:, :n], losses.sizes, margin=rules.margin, bound=Bound.EVERY_LOOK)[0]
        for n in range(1, len(seconds) + 1)
    ]
    verdict, reason = conclude(looks[-1], seconds, rules)
    return Decision(verdict, reason, looks, seconds, losses)


def conclude(look: Comparison, seconds: Sequence[float], rules: Rules) -> tuple[str | None, str]:
    """Verdict and reason after the last look; (None, "") to continue."""
    if look.verdict in VERDICTS:
        return VERDICTS[look.verdict], ""
    spent, of_pair = sum(seconds), float(np.mean(seconds))
    found = f" {plural(look.seeds, 'pair')} find a difference of {look.detectable:.2g}." if look.detectable else ""
    if look.seeds >= min(rules.pairs, MAX_PAIRS):
        valid = f"; the error rate holds for {MAX_PAIRS} pairs" if look.seeds >= MAX_PAIRS else ""
        return "undecided", f"{plural(look.seeds, 'pair')} of runs did not settle it{valid}.{found}"
    if spent + of_pair > rules.seconds:
        left = f"Another pair of about {clock(of_pair)} would exceed the budget of {clock(rules.seconds)}"
        return "undecided", f"{left}.{found}"
    return None, ""


def check_same_text(baseline: Run, candidate: Run) -> None:
    """Raises ValueError if two runs with other tokens have other validation texts, by their size."""
    before, after = _text_bytes(baseline), _text_bytes(candidate)
    if not math.isclose(before, after, rel_tol=SAME_BYTES):
        texts = f"the validation texts of the arms differ ({before:,.0f} and {after:,.0f} bytes)"
        raise ValueError(f"{texts}; give both the same data settings and the same split")


def _text_bytes(run: Run) -> float:
    """Bytes of the validation text of a run, as far as it read it; NaN if unknown."""
    windows = run.windows("final")
    return math.nan if windows is None else float(windows["targets"].sum()) * run.summary["val_bytes_per_token"]
