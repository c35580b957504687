"""The losses of a sweep's runs on common clusters of the text: documents, else blocks of windows, else the whole text.

G clusters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tril.scripts.ablation.cluster_sums import cluster_sums, common_spans
from tril.scripts.ablation.results import Sweep, Variant
from tril.scripts.ablation.run_files import Run, Windows
from tril.scripts.ablation.statistics import Arm
from tril.scripts.ablation.sweep_files import TUNE
from tril.scripts.ablation.tuning_text import is_tuning

WINDOWS_OF = {"final": "last", "best": "best"}  # validation -> attribute of Run
NATS, BITS = "nats per token", "bits per byte"


@dataclass(frozen=True)
class ComparableLosses:
    """Losses of some variants and of the baseline on the same clusters.

    Attributes:
        arms: label -> seed -> (G,) mean loss of each cluster; the seeds are those of the baseline.
        compared: labels of the variants to compare; the other arms only tell about the variance between seeds.
        targets: (G,) number of targets of each cluster.
        clusters: what a cluster is, "documents" or "blocks of windows"; "" for the whole text.
        reasons: label -> why its text is compared as a whole.
    """

    arms: dict[str, Arm]
    baseline: Arm
    compared: tuple[str, ...]
    targets: np.ndarray
    unit: str
    clusters: str
    reasons: Mapping[str, str]


def comparable_losses(sweep: Sweep, which: str) -> list[ComparableLosses]:
    """The losses by clusters of the variants that share text and tokenizer with the baseline; then those of the others.

    In a tuned sweep, the clusters that chose the learning rates are left out.

    Args:
        sweep: with at least one variant.
        which: "final" or "best" validation.
    """
    attribute = WINDOWS_OF[which]
    others = [variant for variant in sweep.variants if variant is not sweep.baseline]
    base = {run.seed: run for run in sweep.baseline.finished}
    runs = {variant.label: _with_common_seed(variant, base) for variant in others}
    reasons = {
        label: reason
        for label, mine in runs.items()
        if (reason := _why_whole([*mine.values(), *(base[seed] for seed in mine)], attribute))
    }
    paired = [label for label in runs if label not in reasons]
    found = []
    if paired:
        sides = {label: runs[label] for label in paired}
        seeds = set().union(*sides.values())
        keys = [("", seed) for seed in sorted(seeds)] + [(label, seed) for label in paired for seed in sides[label]]
        every = [base[seed] if label == "" else sides[label][seed] for label, seed in keys]
        nll, targets, clusters = _clusters([getattr(run, attribute) for run in every], tuned=TUNE in sweep.index)
        arms: dict[str, dict[int, np.ndarray]] = {label: {} for label in ["", *paired]}
        for (label, seed), losses in zip(keys, nll, strict=True):
            arms[label][seed] = losses / targets
        of_baseline = arms.pop("")
        found.append(ComparableLosses(dict(arms), of_baseline, tuple(paired), targets, NATS, clusters, {}))
    if reasons:
        arms = {label: _whole(mine, which) for label, mine in runs.items()}
        whole = ComparableLosses(
            dict(arms), _whole(base, which), tuple(reasons), np.ones(1), BITS, clusters="", reasons=reasons
        )
        found.append(whole)
    return found


def _with_common_seed(variant: Variant, baseline: Mapping[int, Run]) -> dict[int, Run]:
    return {run.seed: run for run in variant.finished if run.seed in baseline}


def _whole(runs: Mapping[int, Run], which: str) -> dict[int, np.ndarray]:
    return {seed: np.array([run.summary[f"{which}_val_bpb"]]) for seed, run in runs.items() if run.summary}


def _why_whole(runs: Sequence[Run], attribute: str) -> str:
    """Why the runs have no common clusters; "" if they have."""
    windows = [found for run in runs if (found := getattr(run, attribute)) is not None]
    texts = {run.summary.get("data_fingerprint") for run in runs if run.summary}
    if len(windows) < len(runs):
        return "the losses of single windows were not kept"
    if runs and (None in texts or len(texts) > 1):
        return "their text or tokenizer differ, or were not recorded"
    spans = [targets for _, targets in common_spans(windows)]
    if any(not np.array_equal(each, spans[0]) for each in spans):
        return "their windows do not cover the same text"
    return ""


def _clusters(windows: Sequence[Windows], *, tuned: bool) -> tuple[list[np.ndarray], np.ndarray, str]:
    """Sums of losses (G,) of each run, targets (G,), and what a cluster is; without runs, one cluster."""
    if not windows:
        return [], np.ones(1), ""
    nll, targets, clusters = cluster_sums(windows)
    kept = targets > 0
    if tuned and len(targets) > 1:
        kept &= ~is_tuning(len(targets))
    return list(nll[:, kept]), targets[kept].astype(float), clusters
