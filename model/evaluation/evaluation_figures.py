"""The figures of an evaluation, each with its interval over the documents of the text.

Letters: M targets, T context length, G clusters (documents, or blocks of windows of a text with few documents).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from tril.model.evaluation.target_scores import TargetScores
from tril.model.gpt import IGNORE
from tril.model.intervals import ClusteredMean, Interval, clustered_mean
from tril.model.text_clusters import TextClusters

N_BINS = 15  # of the confidence, as in Guo et al. (2017), "On calibration of modern neural networks"
NO_BYTES = 1e-9  # the size of a cluster without text, such as one end-of-text token, so that its bits count


@dataclass(frozen=True)
class ScoredText:
    """The scores of a model on a text, with its clusters.

    Attributes:
        scores: of M targets.
        clusters: of the targets, in rows of T.
        cluster: (M,) int64, the cluster of each target.
        bytes: (G,) float64, the UTF-8 bytes of each cluster's targets.
    """

    scores: TargetScores
    clusters: TextClusters
    cluster: np.ndarray
    bytes: np.ndarray

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums values (M,) over each cluster: (G,)."""
        return np.bincount(self.cluster, values, len(self.bytes))

    def mean(self, values: np.ndarray, chosen: np.ndarray | None = None) -> ClusteredMean:
        """Mean of values (M,) over all targets, or over the `chosen` ones, (M,) bool."""
        chosen = np.ones(len(values), bool) if chosen is None else chosen
        return clustered_mean(self.sums(values * chosen), self.sums(chosen.astype(float)))

    def bits_per_byte(self, nats: np.ndarray) -> ClusteredMean:
        """Bits per byte of losses, or of differences of losses, with the sums (G,) in nats."""
        return clustered_mean(nats / math.log(2), self.bytes)


def scored_text(
    scores: TargetScores, tokens: np.ndarray, length: int, tokenizer: Tokenizer, eot_id: int, n_bytes: int
) -> ScoredText:
    """Finds the documents of the targets, and their bytes.

    Args:
        tokens: (number of tokens,) ids of the text.
        length: T.
        eot_id: of the token that opens a document.
        n_bytes: of the whole text, which counts if all targets are scored. Of some windows, the bytes of the decoded
            tokens count, without end-of-text.
    """
    documents = np.cumsum(tokens == eot_id)[scores.inputs]  # (M,)
    filled = -len(documents) % length
    targets = torch.from_numpy(np.pad(tokens[scores.inputs + 1].astype(np.int64), (0, filled), constant_values=IGNORE))
    rows = torch.from_numpy(np.pad(documents, (0, filled), mode="edge")).view(-1, length)
    clusters = TextClusters.of(rows, targets.view(-1, length))
    cluster = clusters.numbers.flatten().numpy()[: len(documents)]
    sizes = _bytes_of_clusters(targets.numpy()[: len(documents)], cluster, len(clusters.targets), tokenizer, eot_id)
    if len(documents) == len(tokens) - 1:  # the bytes of the first token count too, as in val/bpb
        sizes *= n_bytes / sizes.sum()
    return ScoredText(scores, clusters, cluster, sizes)


def _bytes_of_clusters(
    targets: np.ndarray, cluster: np.ndarray, n_clusters: int, tokenizer: Tokenizer, eot_id: int
) -> np.ndarray:
    order = np.argsort(cluster, kind="stable")
    ends = np.cumsum(np.bincount(cluster, minlength=n_clusters))
    texts = [ids[ids != eot_id].tolist() for ids in np.split(targets[order], ends[:-1])]
    decoded = tokenizer.decode_batch(texts, skip_special_tokens=False)
    return np.array([max(float(len(text.encode())), NO_BYTES) for text in decoded])


def figures(text: ScoredText) -> dict[str, Interval]:
    """The figures by name, with 95 % intervals over the clusters."""
    scores = text.scores
    loss = text.mean(scores.nll).interval()
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": text.bits_per_byte(text.sums(scores.nll)).interval(),
        "accuracy": accuracy(text),
        "calibration_error": calibration_error(text),
    }


def accuracy(text: ScoredText, chosen: np.ndarray | None = None) -> Interval:
    """The share of targets that are the most probable token; of all targets, or of the `chosen` ones, (M,) bool."""
    found = text.mean(text.scores.correct.astype(float), chosen).interval()
    low, high = (None if end is None else min(1.0, max(0.0, end)) for end in (found.low, found.high))
    return Interval(found.mean, low, high, found.n)


def perplexity(loss: Interval) -> Interval:
    """exp of a loss, and of the ends of its interval."""
    with np.errstate(over="ignore"):
        low, high = (None if end is None else float(np.exp(end)) for end in (loss.low, loss.high))
        return Interval(float(np.exp(loss.mean)), low, high, loss.n)


def bin_numbers(confidence: np.ndarray) -> np.ndarray:
    """The bin of each confidence (M,): N_BINS of equal width from 0 to 1."""
    return np.minimum((confidence.astype(float) * N_BINS).astype(int), N_BINS - 1)


def calibration_error(text: ScoredText) -> Interval:
    """The expected calibration error: |accuracy - mean confidence| of each bin, averaged over the targets.

    With the sign of each bin's difference it is a mean over targets, and the interval is that of this mean, for the
    signs that were found.
    """
    confidence, bins = text.scores.confidence.astype(float), bin_numbers(text.scores.confidence)
    excess = text.scores.correct - confidence  # (M,)
    signs = np.sign(np.bincount(bins, excess, N_BINS))  # (N_BINS,)
    found = text.mean(signs[bins] * excess).interval()
    return Interval(found.mean, None if found.low is None else max(0.0, found.low), found.high, found.n)


def calibration(text: ScoredText) -> list[dict[str, Any]]:
    """The bins of the confidence that hold targets."""
    confidence, bins = text.scores.confidence.astype(float), bin_numbers(text.scores.confidence)
    rows = []
    for number in np.unique(bins):
        chosen = bins == number
        rows.append(
            {
                "from": number / N_BINS,
                "to": (number + 1) / N_BINS,
                "targets": int(chosen.sum()),
                "confidence": float(confidence[chosen].mean()),
                "accuracy": accuracy(text, chosen),
            }
        )
    return rows


def loss_by_position(text: ScoredText) -> list[dict[str, Any]]:
    """The mean loss by the number of tokens of context: 1, 2, 3 to 4, 5 to 8 and so on."""
    bins = np.ceil(np.log2(text.scores.columns + 1)).astype(int)  # (M,)
    rows = []
    for number in np.unique(bins):
        chosen = bins == number
        first, last = (int(end(text.scores.columns[chosen])) + 1 for end in (np.min, np.max))
        loss = text.mean(text.scores.nll, chosen).interval()
        rows.append({"first": first, "last": last, "targets": int(chosen.sum()), "loss": loss})
    return rows


def verdict(difference: Interval) -> str:
    """Of the losses of two models, the second minus the first."""
    if difference.low is None or difference.high is None:
        return "no interval"
    if difference.low <= 0 <= difference.high:
        return "not distinguishable"
    return "higher" if difference.mean > 0 else "lower"
