"""Reads the losses of pairs of runs: their differences, and how much these depend on the choice of the text.

n pairs, G clusters of the validation text (documents, or blocks of windows).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tril.model.intervals import MIN_DOCUMENTS, block_starts, clustered_mean, t_quantile
from tril.scripts.ablation.run_files import Run, Windows
from tril.scripts.ablation.variances import text_variance
from tril.scripts.trials.sequential import ALPHA

SAME_BYTES = 1e-6  # relative: rounding of bytes per token


@dataclass(frozen=True)
class PairedLosses:
    """Losses of n pairs.

    Attributes:
        baseline: (n,) validation loss of each run.
        candidate: the same of the other arm.
        unit: "nats per token", or "bits per byte" if the tokenizers differ.
        clusters: sums of the differences in nats (n, G) and numbers of targets (G,); None if unknown.
        remark: why there are no clusters; may be empty.
    """

    baseline: np.ndarray
    candidate: np.ndarray
    unit: str
    clusters: tuple[np.ndarray, np.ndarray] | None
    remark: str = ""

    @property
    def differences(self) -> np.ndarray:
        """(n,) candidate - baseline."""
        return self.candidate - self.baseline

    def first(self, n: int) -> "PairedLosses":
        """The first n pairs."""
        clusters = self.clusters and (self.clusters[0][:n], self.clusters[1])
        return PairedLosses(self.baseline[:n], self.candidate[:n], self.unit, clusters, self.remark)


def pair_losses(baseline: Sequence[Run], candidate: Sequence[Run]) -> PairedLosses:
    """Pairs the finished runs of two arms by their index.

    Raises:
        ValueError: the arms have other validation texts.
    """
    runs = [*baseline, *candidate]
    texts = {_summary(run).get("data_fingerprint") for run in runs}
    if len(texts) == 1 and None not in texts:
        before, after = (_losses(arm, "final_val_loss") for arm in (baseline, candidate))
        clusters = _clusters(baseline, candidate)
        if isinstance(clusters, str):
            return PairedLosses(before, after, "nats per token", None, clusters)
        return PairedLosses(before, after, "nats per token", clusters)
    before, after = _text_bytes(baseline[0]), _text_bytes(candidate[0])
    if not math.isclose(before, after, rel_tol=SAME_BYTES):
        texts = f"the validation texts of the arms differ ({before:,.0f} and {after:,.0f} bytes)"
        raise ValueError(f"{texts}; give both the same data settings and the same split")
    before, after = (_losses(arm, "final_val_bpb") for arm in (baseline, candidate))
    remark = "the data or tokenizers differ, so runs are compared by the bits per byte of the whole text"
    return PairedLosses(before, after, "bits per byte", None, remark)


def text_half_width(clusters: tuple[np.ndarray, np.ndarray], alpha: float = ALPHA) -> float:
    """Half width of the interval for another text of the same kind.

    The variance of the mean difference over clusters has two parts: what the clusters have in common over all pairs,
    and what differs from pair to pair. The interval over seeds covers the second one, so it is subtracted.

    Args:
        clusters: sums of differences (n, G) and targets (G,).
        alpha: two-sided.
    """
    sums, targets = clusters
    if len(sums) > 1 and len(targets) > 1:
        variance, df = text_variance(sums / targets, targets)
        return t_quantile(df, alpha) * math.sqrt(variance)
    found = clustered_mean(sums.mean(0), targets)
    return t_quantile(found.df, alpha) * found.se if math.isfinite(found.se) else math.inf


def _clusters(baseline: Sequence[Run], candidate: Sequence[Run]) -> tuple[np.ndarray, np.ndarray] | str:
    """The clusters of all pairs, or why they are unknown."""
    sides = [[run.last for run in arm] for arm in (baseline, candidate)]
    every = [windows for side in sides for windows in side if windows is not None]
    if len(every) < sum(map(len, sides)):
        return "the losses of documents and windows were not kept, so the interval is about this text"
    targets = every[0].document_targets
    if targets is not None and _same(every, "document_targets") and np.count_nonzero(targets) >= MIN_DOCUMENTS:
        kept = targets > 0
        return _differences(sides, "document_nll")[:, kept], targets[kept]
    if not _same(every, "targets"):
        return "the windows of the arms do not cover the same text, so the interval is about this text"
    starts = block_starts(every[0].targets)
    return np.add.reduceat(_differences(sides, "nll"), starts, axis=1), np.add.reduceat(every[0].targets, starts)


def _same(windows: Sequence[Windows], name: str) -> bool:
    first = getattr(windows[0], name)
    return all(np.array_equal(getattr(each, name), first) for each in windows)


def _differences(sides: list[list], name: str) -> np.ndarray:
    """(n, ...) candidate - baseline."""
    baseline, candidate = (np.stack([getattr(windows, name) for windows in side]) for side in sides)
    return candidate - baseline


def _losses(arm: Sequence[Run], name: str) -> np.ndarray:
    return np.array([_summary(run)[name] for run in arm])


def _summary(run: Run) -> dict:
    assert run.summary is not None, run.folder
    return run.summary


def _text_bytes(run: Run) -> float:
    """Bytes of the validation text of a run, as far as it read it; NaN if unknown."""
    if run.last is None:
        return math.nan
    return float(run.last.targets.sum()) * _summary(run)["val_bytes_per_token"]
