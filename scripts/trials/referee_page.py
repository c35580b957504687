"""The files of a comparison: referee.json, report.md and interval.png."""

from functools import partial
from pathlib import Path

import numpy as np

from tril.model.atomic_files import write_json, write_text
from tril.model.comparison import LOOKS_ALPHA, MAX_PAIRS, Comparison
from tril.scripts.cli.formats import clock, plural
from tril.scripts.experiments.report import render, table
from tril.scripts.trials.arms import Arm
from tril.scripts.trials.decision import Decision, Rules

PICTURE = "interval.png"


def sentence(decision: Decision) -> str:
    """The result in one line."""
    verdict = decision.verdict or "undecided"
    after = f"after {plural(len(decision.seconds), 'pair')} of runs in {clock(sum(decision.seconds))}"
    if not decision.looks:
        return " ".join(filter(None, [f"{verdict} {after}", decision.reason and f"({decision.reason})"]))
    assert decision.losses is not None
    interval = f"candidate - baseline = {span(decision.looks[-1])} {decision.losses.unit}"
    return " ".join(filter(None, [f"{verdict}: {interval}, {after}.", decision.reason]))


def span(look: Comparison) -> str:
    """The mean and its interval."""
    difference = look.difference
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+z.4f} (no interval yet)"
    ends = f"{1 - LOOKS_ALPHA:.0%} interval {difference.low:+z.4f} to {difference.high:+z.4f}"
    return f"{difference.mean:+z.4f} ({ends})"


def write_record(folder: Path, decision: Decision, arms: tuple[Arm, Arm], rules: Rules, root: Path, seed: int) -> dict:
    """Writes referee.json, without rounding, and returns its content."""
    content = {"verdict": decision.verdict, "reason": decision.reason, "margin": rules.margin, "seed": seed}
    content |= {"seconds": rules.seconds, "alpha": LOOKS_ALPHA, "max_pairs": MAX_PAIRS}
    content |= {arm.name: arm.to_dict(root) for arm in arms}
    if decision.losses is not None:
        rows = zip(decision.seconds, *decision.means.tolist(), strict=True)
        content |= {"unit": decision.losses.unit, "documents": decision.losses.documents}
        content["pairs"] = [{"seconds": s, "baseline": b, "candidate": c, "difference": c - b} for s, b, c in rows]
        content["looks"] = [
            {"mean": look.difference.mean, "low": look.difference.low, "high": look.difference.high}
            for look in decision.looks
        ]
    write_json(folder / "referee.json", content)
    return content


def write_page(folder: Path, content: dict, decision: Decision, rules: Rules) -> None:
    """Writes report.md, and interval.png once there is an interval."""
    drawn = any(look.difference.low is not None for look in decision.looks)
    if drawn:
        plot_looks(folder / PICTURE, decision, rules.margin)
    rows = [["pairs", "time", "difference of the pair", "mean and interval"]]
    spent = np.cumsum(decision.seconds)
    for pair, look, seconds in zip(content.get("pairs", []), decision.looks, spent, strict=False):
        rows.append([str(look.seeds), clock(float(seconds)), f"{pair['difference']:+z.4f}", span(look)])
    values = {"answer": sentence(decision), "picture": PICTURE if drawn else None, "looks": table(rows)}
    write_text(folder / "report.md", render(Path(__file__).with_name("referee.md.jinja"), record=content, **values))


def plot_looks(path: Path, decision: Decision, margin: float) -> None:
    """Draws the differences of the pairs and the interval after each of them."""
    from matplotlib.ticker import MaxNLocator

    from tril.scripts.experiments.plots import COLORS, new_axes

    assert decision.losses is not None
    looks = [look for look in decision.looks if look.difference.low is not None]
    n, means = [look.seeds for look in looks], [look.difference.mean for look in looks]
    halves = [look.difference.half_width for look in looks]
    baseline, candidate = decision.means
    axes = new_axes(3.6)
    axes.axhspan(-margin, margin, color="#dddddd", label=f"margin ±{margin:g}")
    axes.axhline(0, color="black", lw=0.8)
    axes.errorbar(n, means, halves, color=COLORS[0], marker="o", ms=4, capsize=3, label="mean, interval")
    axes.plot(range(1, len(baseline) + 1), candidate - baseline, "x", color=COLORS[1], label="difference of one pair")
    axes.set(xlabel="pairs of runs", ylabel=f"candidate - baseline, {decision.losses.unit}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    per_pair = float(np.mean(decision.seconds)) / 60
    minutes = axes.secondary_xaxis("top", functions=(partial(np.multiply, per_pair), lambda x: np.divide(x, per_pair)))
    minutes.set_xlabel("minutes of training")
    axes.legend(fontsize=8, loc="best")
    axes.figure.savefig(path, dpi=130)  # pyright: ignore[reportAttributeAccessIssue] a Figure
