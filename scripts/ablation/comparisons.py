"""Compares the variants of a sweep with its baseline, paired by seed and validation window. N validation windows."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tril.scripts.ablation.results import Sweep, Variant
from tril.scripts.ablation.run_files import Run
from tril.scripts.ablation.statistics import Comparison, compare

WINDOWS_OF = {"final": "last", "best": "best"}  # validation -> attribute of Run


def compare_with_baseline(sweep: Sweep, which: str = "final") -> dict[str, Comparison]:
    """Compares the finished runs of each other variant with those of the baseline; all comparisons form one family.

    Windows of different lengths are merged into the shortest spans of text that consist of whole windows of all runs.
    If text or tokenizer differ, or the losses of windows were not saved, the bits per byte of the whole text are paired
    by seed alone, and the remark says so.

    Args:
        sweep: with at least one variant.
        which: "final" or "best" validation.

    Returns:
        Label -> comparison.
    """
    others = [variant for variant in sweep.variants if variant is not sweep.baseline]
    return {variant.label: _compare(variant, sweep.baseline, which, len(others)) for variant in others}


def _compare(variant: Variant, baseline: Variant, which: str, n_comparisons: int) -> Comparison:
    sides = [{run.seed: run for run in side.finished} for side in (variant, baseline)]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    runs = [side[seed] for side in sides for seed in seeds]
    paired, unit, remarks = _paired_windows(runs, WINDOWS_OF[which]), Comparison.unit, []
    if isinstance(paired, str):
        remarks.append(f"Compared as a whole, by seed alone: {paired}.")
        whole = [np.array([run.summary[f"{which}_val_bpb"]]) for run in runs if run.summary]
        paired, unit = (whole, np.ones(1)), "bits per byte"
    losses, weights = paired
    of_variant = dict(zip(seeds, losses[: len(seeds)], strict=True))
    of_baseline = dict(zip(seeds, losses[len(seeds) :], strict=True))
    found = compare(of_variant, of_baseline, weights, n_comparisons=n_comparisons)
    if left_out := sorted({run.seed for side in (variant, baseline) for run in side.runs} - set(seeds)):
        remarks.append(f"Left out, because not finished in both: seed {', '.join(map(str, left_out))}.")
    return replace(found, remark=" ".join(filter(None, [found.remark, *remarks])), unit=unit)


def _paired_windows(runs: Sequence[Run], which: str) -> tuple[list[np.ndarray], np.ndarray] | str:
    """Mean loss of each span of text (N,) in each run and targets of each span (N,), or why pairing is impossible."""
    if not runs:
        return [], np.ones(1)
    windows = [found for run in runs if (found := getattr(run, which)) is not None]
    texts = {run.summary.get("data_fingerprint") for run in runs if run.summary}
    if len(windows) < len(runs):
        return "the losses of single windows were not kept"
    if None in texts or len(texts) > 1:
        return "their text or tokenizer differ, or were not recorded"
    span = math.lcm(*(each.context_length for each in windows))
    starts = [np.arange(0, len(each.nll), span // each.context_length) for each in windows]
    nll, targets = (
        [np.add.reduceat(getattr(each, name), at) for each, at in zip(windows, starts, strict=True)]
        for name in ("nll", "targets")
    )
    if any(not np.array_equal(row, targets[0]) for row in targets):
        return "their windows do not cover the same text"
    return [row / targets[0] for row in nll], targets[0]
