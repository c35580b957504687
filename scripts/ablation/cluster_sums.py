"""Sums of validation losses over the clusters of the text: documents, or blocks of windows if there are few documents.

N windows, D documents, G clusters.
"""

import math
from collections.abc import Sequence

import numpy as np

from tril.model.intervals import MIN_DOCUMENTS, block_starts
from tril.scripts.ablation.run_files import Windows


def cluster_sums(windows: Sequence[Windows]) -> tuple[np.ndarray, np.ndarray, str]:
    """Losses of some runs on their common clusters.

    Args:
        windows: of S >= 1 runs, which cover the same text.

    Returns:
        Nats (S, G) and targets (G,) of each cluster, and what a cluster is: "documents" or "blocks of windows". A
        document may have no target.
    """
    documents = windows[0].document_targets
    if documents is not None and have_documents(windows):
        return np.array([each.document_nll for each in windows], float), documents, "documents"
    spans = common_spans(windows)
    starts = block_starts(spans[0][1])
    nll = np.add.reduceat([losses for losses, _ in spans], starts, axis=1)
    return np.asarray(nll, float), np.add.reduceat(spans[0][1], starts), "blocks of windows"


def have_documents(windows: Sequence[Windows]) -> bool:
    """Whether all runs have the losses of the same documents, at least MIN_DOCUMENTS."""
    first = windows[0].document_targets
    if first is None or np.count_nonzero(first) < MIN_DOCUMENTS:
        return False
    sizes = [each.document_targets for each in windows]
    return all(each is not None and np.array_equal(each, first) for each in sizes)


def common_spans(windows: Sequence[Windows]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sums of losses and targets of the shortest spans of text that consist of whole windows of all."""
    span = math.lcm(*(each.context_length for each in windows))
    starts = [np.arange(0, len(each.nll), span // each.context_length) for each in windows]
    return [
        (np.add.reduceat(each.nll, at), np.add.reduceat(each.targets, at))
        for each, at in zip(windows, starts, strict=True)
    ]
