"""Reads the losses of pairs of runs: their differences, and how much these depend on the choice of the text.

n pairs, G clusters of the validation text (documents, or blocks of windows).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tril.model.comparison import text_variance
from tril.model.intervals import clustered_mean, t_quantile
from tril.scripts.experiments.losses import document_sums
from tril.scripts.experiments.sweep import Run, scored_part
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
    scored_part(runs)
    texts = {run.summary.get("data_fingerprint") for run in runs}
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
    windows = [run.windows("final") for run in (*baseline, *candidate)]
    kept = [each for each in windows if each is not None]
    if len(kept) < len(windows):
        return "the losses of documents and windows were not kept, so the interval is about this text"
    nll, targets, _ = document_sums(kept)  # (2 n, G), (G,)
    if nll is None:
        return "the windows of the arms do not cover the same text, so the interval is about this text"
    return nll[len(baseline) :] - nll[: len(baseline)], targets


def _losses(arm: Sequence[Run], name: str) -> np.ndarray:
    return np.array([run.summary[name] for run in arm])


def _text_bytes(run: Run) -> float:
    """Bytes of the validation text of a run, as far as it read it; NaN if unknown."""
    windows = run.windows("final")
    return math.nan if windows is None else float(windows["targets"].sum()) * run.summary["val_bytes_per_token"]
