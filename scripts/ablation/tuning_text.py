"""The part of the validation text that chooses learning rates, which the comparisons of a tuned sweep leave out.

The clusters of the text are its documents, or blocks of windows if there are few documents.
"""

import math

import numpy as np

from tril.scripts.ablation.cluster_sums import cluster_sums
from tril.scripts.ablation.run_files import Windows

STRIDE = 4  # of four clusters, one is for tuning


def is_tuning(n_clusters: int) -> np.ndarray:
    """(n_clusters,) bool: True for the clusters that choose learning rates, False for those that a report compares."""
    return np.arange(n_clusters) % STRIDE == 0


def tuning_loss(windows: Windows) -> float:
    """Nats per token on the clusters for tuning; infinite for a diverged run, so that it is never chosen."""
    [nll], targets, _ = cluster_sums([windows])
    chosen = is_tuning(len(targets))
    loss = float(nll[chosen].sum() / targets[chosen].sum())
    return loss if math.isfinite(loss) else math.inf
