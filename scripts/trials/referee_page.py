"""The files of a comparison: referee.json, losses.npz, report.md and interval.png."""

import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from tril.model.atomic_files import atomic_path, write_json, write_text
from tril.scripts.cli.formats import clock, plural
from tril.scripts.experiments.report import render, table
from tril.scripts.trials.arms import Arm
from tril.scripts.trials.decision import Decision, Rules
from tril.scripts.trials.sequential import ALPHA, MAX_PAIRS, Look

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


def span(look: Look) -> str:
    """The mean and its interval."""
    if not math.isfinite(look.half):
        return f"{look.mean:+z.4f} (no interval yet)"
    return f"{look.mean:+z.4f} ({1 - ALPHA:.0%} interval {look.low:+z.4f} to {look.high:+z.4f})"


def record(decision: Decision, arms: tuple[Arm, Arm], rules: Rules, root: Path, *, seed: int, paired: bool) -> dict:
    """The content of referee.json, without rounding."""
    looks = [asdict(look) | {"low": look.low, "high": look.high} for look in decision.looks]
    content = {"verdict": decision.verdict, "reason": decision.reason, "rules": asdict(rules)}
    content |= {"seed": seed, "paired": paired, "alpha": ALPHA, "max_pairs": MAX_PAIRS}
    content |= {arm.name: arm.to_dict(root) for arm in arms}
    losses = decision.losses
    if losses is not None:
        rows = zip(decision.seconds, losses.baseline.tolist(), losses.candidate.tolist(), strict=True)
        content |= {
            "unit": losses.unit,
            "remark": losses.remark,
            "pairs": [{"seconds": s, "baseline": b, "candidate": c, "difference": c - b} for s, b, c in rows],
        }
    return content | {"looks": looks}


def write_record(folder: Path, content: dict, decision: Decision) -> None:
    """Writes referee.json, and losses.npz with the sums of the differences of each cluster of the text."""
    if decision.losses is not None and decision.losses.clusters is not None:
        nll, targets = decision.losses.clusters
        with atomic_path(folder / "losses.npz") as part, part.open("wb") as file:
            np.savez_compressed(file, difference=nll, targets=targets)
    write_json(folder / "referee.json", content)


def write_page(folder: Path, content: dict, decision: Decision, rules: Rules) -> None:
    """Writes report.md, and interval.png once there is an interval."""
    drawn = any(math.isfinite(look.half) for look in decision.looks)
    if drawn:
        plot_looks(folder / PICTURE, decision, rules.margin)
    header = ["pairs", "time", "difference", "mean", "low", "high", "text, ±"]
    looks = table([header, *([str(cell) for cell in row.values()] for row in _rows(content, decision))])
    values = {"answer": sentence(decision), "picture": PICTURE if drawn else None, "looks": looks}
    write_text(folder / "report.md", render(Path(__file__).with_name("referee.md.jinja"), record=content, **values))


def _rows(content: dict, decision: Decision) -> list[dict]:
    """One row of the table for each pair."""
    spent = np.cumsum(decision.seconds)
    rows = []
    for pair, look, seconds in zip(content.get("pairs", []), decision.looks, spent, strict=False):
        known = math.isfinite(look.half)
        ends = {"low": f"{look.low:+z.4f}", "high": f"{look.high:+z.4f}"} if known else {"low": "", "high": ""}
        shown = {"n": look.n, "time": clock(float(seconds)), "difference": f"{pair['difference']:+z.4f}"}
        rows.append(shown | {"mean": f"{look.mean:+z.4f}"} | ends | {"text": f"{look.text:.4f}"})
    return rows


def plot_looks(path: Path, decision: Decision, margin: float) -> None:
    """Draws the differences of the pairs and the interval after each of them."""
    from matplotlib.ticker import MaxNLocator

    from tril.scripts.experiments.plots import COLORS, new_axes

    assert decision.losses is not None
    looks = [look for look in decision.looks if math.isfinite(look.half)]
    n, means = [look.n for look in looks], [look.mean for look in looks]
    differences = decision.losses.differences
    axes = new_axes(3.6)
    axes.axhspan(-margin, margin, color="#dddddd", label=f"margin ±{margin:g}")
    axes.axhline(0, color="black", lw=0.8)
    axes.fill_between(n, [look.low for look in looks], [look.high for look in looks], color=COLORS[0], alpha=0.25)
    axes.errorbar(
        n, means, [look.half for look in looks], color=COLORS[0], marker="o", ms=4, capsize=3, label="mean, interval"
    )
    axes.plot(range(1, len(differences) + 1), differences, "x", color=COLORS[1], label="difference of one pair")
    axes.set(xlabel="pairs of runs", ylabel=f"candidate - baseline, {decision.losses.unit}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    per_pair = float(np.mean(decision.seconds)) / 60
    minutes = axes.secondary_xaxis("top", functions=(partial(np.multiply, per_pair), lambda x: np.divide(x, per_pair)))
    minutes.set_xlabel("minutes of training")
    axes.legend(fontsize=8, loc="best")
    axes.figure.savefig(path, dpi=130)  # pyright: ignore[reportAttributeAccessIssue] a Figure
