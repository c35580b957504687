"""At which steps the heads of a sweep's runs become what they are: the section of the report, from their heads.csv."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tril.model.comparison import BETTER, WORSE, Comparison
from tril.model.heads.records import HeadRecords, read_records
from tril.model.intervals import Interval, mean_interval
from tril.scripts.experiments.losses import Losses, compare_sweep
from tril.scripts.experiments.plots import WIDTH, line_styles
from tril.scripts.experiments.sweep import Sweep

KINDS = {"previous": "previous token", "first": "first token", "self": "same token", "induction": "induction"}
CONTEXT = "in-context loss"  # of the second copy of repeated sequences minus that of the first
# Below these (of the weight; nats per token) there is no step: half of less is passed by chance. In the runs of
# docs/emergence.md, the losses of both copies differ by up to 0.23 while no induction score exceeds 0.02.
MIN_SCORE, MIN_DROP = 0.1, 0.3
VERDICTS = {BETTER: "earlier", WORSE: "later"}
Steps = dict[str, np.ndarray]  # kind -> (V, S), the step of each variant, the baseline first, and seed


def crossing(steps: np.ndarray, values: np.ndarray, level: float) -> float:
    """The first step at which the values reach the level, interpolated between two records."""
    after = int(np.argmax(values >= level))
    if after == 0:
        return float(steps[0])
    (x, end), (low, high) = steps[after - 1 : after + 1], values[after - 1 : after + 1]
    return float(x + (end - x) * (level - low) / (high - low))


def steps_of(records: HeadRecords) -> dict[str, float]:
    """When each kind of head has appeared: the step at which the strongest head passes half of its final score.

    The strongest head is that of the largest final score. For CONTEXT, the step at which half of the total drop is
    made. NaN for what does not appear: a final score below MIN_SCORE or twice that of uniform weights, a drop below
    MIN_DROP.
    """
    found = {}
    for kind in KINDS:
        *heads, uniform = records.scores[kind].T  # (N,) each
        strongest = max(heads, key=lambda scores: scores[-1])
        appears = strongest[-1] >= max(MIN_SCORE, 2 * uniform[-1])
        found[kind] = crossing(records.steps, strongest, strongest[-1] / 2) if appears else math.nan
    gain = records.losses[:, 0] - records.losses[:, 1]
    drops = gain[-1] - gain[0] >= MIN_DROP
    return found | {CONTEXT: crossing(records.steps, gain, (gain[0] + gain[-1]) / 2) if drops else math.nan}


def read_steps(sweep: Sweep) -> Steps:
    """The steps of all finished runs; NaN where a head does not appear. {}: no run has recorded its heads.

    Raises:
        ValueError: a heads.csv is damaged.
    """
    seeds = sorted({run.seed for run in sweep.runs})
    found = {}
    for v, variant in enumerate([sweep.baseline, *sweep.others]):
        for run in variant.finished:
            if not run.diverged and (records := read_records(run.folder)) is not None:
                found[v, seeds.index(run.seed)] = steps_of(records)
    if not found:
        return {}
    steps = {kind: np.full((len(sweep.variants), len(seeds)), math.inf) for kind in (*KINDS, CONTEXT)}
    for index, values in found.items():
        for kind, step in values.items():
            steps[kind][index] = step
    return steps


def number(interval: Interval, sign: str = "") -> str:
    half = "" if interval.low is None else f" ± {interval.half_width:,.0f}"
    return f"{interval.mean:{sign},.0f}{half}"


def appearance_rows(sweep: Sweep, steps: Steps) -> list[list[str]]:
    """A row for each variant: the mean step of each kind, in how many seeds it appears, and what comes first."""
    rows = [["variant", *KINDS.values(), CONTEXT, "previous token before induction"]]
    for v, variant in enumerate([sweep.baseline, *sweep.others]):
        cells = []
        for by_seed in steps.values():
            measured = by_seed[v][~np.isinf(by_seed[v])]
            seen = measured[~np.isnan(measured)]
            text = number(mean_interval(seen.tolist())) if len(seen) else "never"
            cells.append(f"{text} ({len(seen)} of {len(measured)})" if len(measured) else "-")
        previous, induction = steps["previous"][v], steps["induction"][v]
        both = np.isfinite(previous) & np.isfinite(induction)
        rows.append([variant.label, *cells, f"{(previous < induction)[both].sum()} of {both.sum()}"])
    return rows


def difference_rows(sweep: Sweep, steps: Steps) -> list[list[str]]:
    """A row for each other variant: the difference of each step from the baseline, over the seeds in which both have
    one, by the comparison of the losses."""

    def cell(each: Comparison) -> str:
        if not math.isfinite(each.difference.mean):
            return "-"
        return f"{number(each.difference, '+')}, {VERDICTS.get(each.verdict, each.verdict)}"

    columns: list[Mapping[str, Comparison]] = []
    for by_seed in steps.values():
        values = np.where(np.isfinite(by_seed), by_seed, math.nan)[..., None]  # (V, S, 1)
        columns.append(compare_sweep(Losses(values, np.ones(1), "steps", "the steps"), sweep))
    rows = [[label, *(cell(column[label]) for column in columns)] for label in columns[0]]
    return [["variant", *KINDS.values(), CONTEXT], *rows] if rows else []


def plot_steps(sweep: Sweep, steps: Steps) -> tuple[Any, str, str]:
    """The step of each kind in each seed, and the mean of each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8 + 0.9 * len(steps)), layout="constrained")
    axes, styles = figure.subplots(), line_styles(sweep)
    for v, variant in enumerate([sweep.baseline, *sweep.others]):
        style = {name: styles[variant.label][name] for name in ("color", "marker")}
        for row, by_seed in enumerate(steps.values()):
            seen, y = by_seed[v][np.isfinite(by_seed[v])], -row - 0.7 * (v + 0.5) / len(sweep.variants) + 0.35
            axes.plot(seen, np.full(len(seen), y), ls="none", ms=3, alpha=0.5, **style)
            if len(seen):
                label = variant.label if variant.label not in axes.get_legend_handles_labels()[1] else None
                axes.plot(seen.mean(), y, ls="none", marker="|", ms=14, mew=2, color=style["color"], label=label)
    axes.set_yticks([-row for row in range(len(steps))], [*KINDS.values(), CONTEXT])
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    figure.legend(loc="outside lower center", fontsize=9, frameon=False, ncols=2)
    return figure, "When heads appear", "A point is one seed, a line the mean of a variant."
