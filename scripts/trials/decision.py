"""What the pairs so far allow to conclude, and whether more of them are trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tril.scripts.cli.formats import clock, plural
from tril.scripts.experiments.sweep import Run
from tril.scripts.trials.pair_runs import WALL_SECONDS
from tril.scripts.trials.paired_losses import PairedLosses, pair_losses, text_half_width
from tril.scripts.trials.sequential import MAX_PAIRS, Look


@dataclass(frozen=True)
class Rules:
    """When to stop.

    Attributes:
        margin: differences below it count as equal.
        seconds: that may be spent on all pairs.
        pairs: that may be trained.
        text: "random", the claim is about text of this kind, or "fixed", about this validation text.
    """

    margin: float
    seconds: float
    pairs: int
    text: str


@dataclass(frozen=True)
class Decision:
    """The state after n pairs.

    Attributes:
        verdict: "better", "worse", "equal" or "undecided"; None: train another pair.
        reason: why there is this verdict, a sentence; may be empty.
        looks: one for each pair, in their order; fewer if a loss is not finite.
        seconds: of each pair, with the start of its processes.
        losses: of all pairs; None without any.
    """

    verdict: str | None
    reason: str
    looks: list[Look]
    seconds: list[float]
    losses: PairedLosses | None


def decide(baseline: Sequence[Run], candidate: Sequence[Run], rules: Rules) -> Decision:
    """The decision after the pairs of finished runs, n of each arm.

    Raises:
        ValueError: the arms have other validation texts.
    """
    seconds = [
        sum(float(str(run.planned[WALL_SECONDS])) for run in pair) for pair in zip(baseline, candidate, strict=True)
    ]
    if not seconds:
        return Decision(None, "", [], seconds, None)
    losses = pair_losses(baseline, candidate)
    bad = {
        name: [run.seed for run, loss in zip(runs, values, strict=True) if not math.isfinite(loss)]
        for name, runs, values in (("candidate", candidate, losses.candidate), ("baseline", baseline, losses.baseline))
    }
    if any(bad.values()):
        return _diverged(bad, seconds, losses)
    looks = [look_at(losses.first(n), rules.text) for n in range(1, len(seconds) + 1)]
    verdict, reason = conclude(looks[-1], seconds, rules)
    return Decision(verdict, reason, looks, seconds, losses)


def look_at(losses: PairedLosses, text: str) -> Look:
    """The look at all pairs; `text` is "random" or "fixed"."""
    counted = text == "random" and losses.clusters is not None
    half = text_half_width(losses.clusters) if counted and losses.clusters else 0.0
    return Look.at(losses.differences, half)


def conclude(look: Look, seconds: Sequence[float], rules: Rules) -> tuple[str | None, str]:
    """Verdict and reason after the last look; (None, "") to continue."""
    if verdict := look.verdict(rules.margin):
        return verdict, ""
    spent, of_pair = sum(seconds), float(np.mean(seconds))
    if look.settled_by_text(rules.margin):
        return "undecided", _needs_text(look, rules.margin)
    if look.n >= min(rules.pairs, MAX_PAIRS):
        limit = plural(look.n, "pair")
        valid = f"; the error rate holds for {MAX_PAIRS} pairs" if look.n >= MAX_PAIRS else ""
        return "undecided", f"{limit} of runs did not settle it{valid}. {outlook(look, of_pair, rules)}"
    if spent + of_pair > rules.seconds:
        left = f"Another pair of about {clock(of_pair)} would exceed the budget of {clock(rules.seconds)}"
        return "undecided", f"{left}. {outlook(look, of_pair, rules)}"
    return None, ""


def outlook(look: Look, seconds_of_pair: float, rules: Rules) -> str:
    """What a verdict would take, as a sentence."""
    if look.n < 2:
        return "Two pairs are needed to estimate what a verdict takes."
    condition = "if mean and standard deviation stay as they are"
    needed = look.pairs_needed(rules.margin)
    if needed is None:
        if Look(look.n, look.mean, look.sd, 0.0, look.text).verdict(rules.margin) is None:
            return _needs_text(look, rules.margin)
        return f"More than {MAX_PAIRS} pairs would be needed {condition}."
    more = needed - look.n
    time = clock(more * seconds_of_pair)
    return f"It would take about {plural(more, 'more pair')} ({time} of training) {condition}."


def _needs_text(look: Look, margin: float) -> str:
    distance = max(abs(look.mean), margin - abs(look.mean))
    times = (look.text / distance) ** 2
    cause = f"The choice of the validation text alone leaves an uncertainty of ± {look.text:.4f}"
    remedy = f"about {times:.0f} times as much validation text, or text=fixed for a claim about this text"
    return f"{cause}, which no number of pairs removes: it would take {remedy}."


def _diverged(bad: dict[str, list[int]], seconds: list[float], losses: PairedLosses) -> Decision:
    """A diverged candidate is worse; a diverged baseline allows no statement."""
    parts = [f"the {name} with seed {', '.join(map(str, seeds))}" for name, seeds in bad.items() if seeds]
    verdict = "undecided" if bad["baseline"] else "worse"
    return Decision(verdict, f"The loss of {' and of '.join(parts)} is not finite.", [], seconds, losses)
