"""A text as scored by a model, and its figures, each with an interval over the documents of the text.

Letters: M targets (tokens but the first), T context length, N stride, W windows, G clusters (documents, or blocks of
windows of a text with few documents).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tril.model.evaluation.scores import score_windows
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import IGNORE
from tril.model.intervals import ClusteredMean, Interval, clustered_mean
from tril.model.text_clusters import TextClusters

N_BINS = 15  # of the confidence, as in Guo et al. (2017), "On calibration of modern neural networks"
NO_BYTES = 1e-9  # the size of a cluster without text, such as one end-of-text token, so that its bits count


def window_starts(n_targets: int, length: int, stride: int, limit: int | None = None) -> np.ndarray:
    """The position of the first input of each window, (W,) int64.

    The first window scores all its targets, each other one the last `stride` of them. With stride = length the windows
    do not overlap, as in validation.

    Args:
        n_targets: M.
        length: T.
        stride: N, at most T.
        limit: at least 2; take this many windows, evenly spaced from the first to the last; None: all.
    """
    assert 1 <= stride <= length, (stride, length)
    n_windows = 1 + max(0, -(-(n_targets - length) // stride))
    numbers = np.arange(n_windows)
    if limit is not None and limit < n_windows:
        numbers = np.arange(limit) * (n_windows - 1) // (limit - 1)
    return numbers * stride


@dataclass(frozen=True)
class ScoredText:
    """The scored targets in the order of the text, as arrays (M,), and their clusters.

    Attributes:
        length: T.
        stride: N.
        windows, of_windows: how many were scored, and how many there are.
        inputs: int64, the position in the text of the token before the target.
        columns: int64, the position of that token in its window, from 0: the target's context has columns + 1 tokens.
        nll, confidence, correct: see `Scores`.
        clusters: of the targets, in rows of T.
        cluster: int64, the cluster of each target.
        bytes: (G,) float64, the UTF-8 bytes of each cluster's targets.
    """

    length: int
    stride: int
    windows: int
    of_windows: int
    inputs: np.ndarray
    columns: np.ndarray
    nll: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray
    clusters: TextClusters
    cluster: np.ndarray
    bytes: np.ndarray

    @classmethod
    def of(
        cls,
        lm: LanguageModel,
        tokens: np.ndarray,
        n_bytes: int,
        *,
        stride: int | None = None,
        limit: int | None = None,
        document_eot: int | None = None,
    ) -> "ScoredText":
        """Scores the text in windows as long as the context.

        Args:
            tokens: (M + 1,) ids of the text.
            n_bytes: of the whole text, which counts if all targets are scored. Of some windows, the bytes of the
                decoded tokens count, without end-of-text.
            stride, limit: see `window_starts`; None: windows that do not overlap.
            document_eot: see `score_windows`.
        """
        length, n_targets = lm.config.context_length, len(tokens) - 1
        stride = stride or length
        starts = window_starts(n_targets, length, stride, limit)  # (W,)
        ends = np.minimum(starts + length, n_targets)
        firsts = np.where(starts == 0, 0, starts + length - stride)  # the others were targets of earlier windows
        windows = [
            (tokens[start : end + 1], end - first) for start, end, first in zip(starts, ends, firsts, strict=True)
        ]
        scores = dict(score_windows(lm.model, windows, document_eot=document_eot))
        inputs = np.concatenate([np.arange(first, end) for first, end in zip(firsts, ends, strict=True)])
        columns = inputs - np.repeat(starts, ends - firsts)
        nll, confidence, correct = map(np.concatenate, zip(*(scores[i] for i in range(len(starts))), strict=True))
        counts = length, stride, len(starts), len(window_starts(n_targets, length, stride))
        return cls(*counts, inputs, columns, nll, confidence, correct, *_clusters(lm, tokens, inputs, n_bytes))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums values (M,) over each cluster: (G,)."""
        return np.bincount(self.cluster, values, len(self.bytes))

    def mean(self, values: np.ndarray, chosen: np.ndarray | None = None) -> Interval:
        """Mean of values (M,) over all targets, or over the `chosen` ones, (M,) bool."""
        chosen = np.ones(len(values), bool) if chosen is None else chosen
        return clustered_mean(self.sums(values * chosen), self.sums(chosen.astype(float))).interval()

    def bits_per_byte(self, nats: np.ndarray) -> ClusteredMean:
        """Bits per byte of losses, or of differences of losses, with the sums (G,) in nats."""
        return clustered_mean(nats / math.log(2), self.bytes)

    def figures(self) -> dict[str, Interval]:
        """The figures by name, with 95 % intervals over the clusters."""
        loss = self.mean(self.nll)
        with np.errstate(over="ignore"):
            perplexity = _ends(loss, lambda end: float(np.exp(end)))
        return {
            "loss": loss,
            "perplexity": perplexity,
            "bits_per_byte": self.bits_per_byte(self.sums(self.nll)).interval(),
            "accuracy": self.accuracy(),
            "calibration_error": self.calibration_error(),
        }

    def accuracy(self, chosen: np.ndarray | None = None) -> Interval:
        """The share of targets that are the most probable token; of all targets, or of the `chosen` ones, (M,) bool."""
        return _ends(self.mean(self.correct.astype(float), chosen), lambda end: min(1.0, max(0.0, end)))

    def _bins(self) -> np.ndarray:
        """The bin of each confidence (M,): N_BINS of equal width from 0 to 1."""
        return np.minimum((self.confidence.astype(float) * N_BINS).astype(int), N_BINS - 1)

    def calibration_error(self) -> Interval:
        """The expected calibration error: |accuracy - mean confidence| of each bin, averaged over the targets.

        With the sign of each bin's difference it is a mean over targets, and the interval is that of this mean, for
        the signs that were found.
        """
        bins, excess = self._bins(), self.correct - self.confidence.astype(float)  # (M,)
        signs = np.sign(np.bincount(bins, excess, N_BINS))  # (N_BINS,)
        return _ends(self.mean(signs[bins] * excess), lambda end: max(0.0, end))

    def calibration(self) -> list[dict[str, Any]]:
        """The bins of the confidence that hold targets."""
        bins, confidence = self._bins(), self.confidence.astype(float)
        return [
            {
                "from": number / N_BINS,
                "to": (number + 1) / N_BINS,
                "targets": int((bins == number).sum()),
                "confidence": float(confidence[bins == number].mean()),
                "accuracy": self.accuracy(bins == number),
            }
            for number in np.unique(bins)
        ]

    def positions(self) -> list[dict[str, Any]]:
        """The mean loss by the number of tokens of context: 1, 2, 3 to 4, 5 to 8 and so on."""
        bins, rows = np.ceil(np.log2(self.columns + 1)).astype(int), []  # (M,)
        for number in np.unique(bins):
            chosen = bins == number
            first, last = (int(end(self.columns[chosen])) + 1 for end in (np.min, np.max))
            loss = self.mean(self.nll, chosen)
            rows.append({"first": first, "last": last, "targets": int(chosen.sum()), "loss": loss})
        return rows

    def report(self) -> dict[str, Any]:
        """The entry of evaluation.json."""
        name = "non-overlapping windows" if self.stride == self.length else f"sliding windows, stride {self.stride}"
        unit = {"unit": self.clusters.unit, "described": self.clusters.describe()}
        return {
            "name": name,
            "context_length": self.length,
            "stride": self.stride,
            "windows": self.windows,
            "of_windows": self.of_windows,
            "targets": len(self.cluster),
            "bytes": round(float(self.bytes.sum())),
            "observations": unit | self.clusters.counts(),
            "figures": self.figures(),
            "calibration_bins": f"{N_BINS} of equal width of the probability of the most probable token",
            "calibration": self.calibration(),
            "positions": self.positions(),
        }


def _ends(interval: Interval, change: Any) -> Interval:
    """The interval with its mean and its ends, where it has them, changed."""
    low, high = (None if end is None else change(end) for end in (interval.low, interval.high))
    return Interval(change(interval.mean), low, high, interval.n)


def _clusters(
    lm: LanguageModel, tokens: np.ndarray, inputs: np.ndarray, n_bytes: int
) -> tuple[TextClusters, np.ndarray, np.ndarray]:
    """`clusters`, `cluster` and `bytes` of `ScoredText`."""
    length, targets = lm.config.context_length, tokens[inputs + 1].astype(np.int64)  # (M,)
    documents = np.cumsum(tokens == lm.eot_id)[inputs]  # (M,)
    filled = -len(documents) % length
    rows = torch.from_numpy(np.pad(documents, (0, filled), mode="edge")).view(-1, length)
    padded = torch.from_numpy(np.pad(targets, (0, filled), constant_values=IGNORE)).view(-1, length)
    clusters = TextClusters.of(rows, padded)
    cluster = clusters.numbers.flatten().numpy()[: len(documents)]
    order, ends = np.argsort(cluster, kind="stable"), np.cumsum(np.bincount(cluster, minlength=len(clusters.targets)))
    texts = [ids[ids != lm.eot_id].tolist() for ids in np.split(targets[order], ends[:-1])]
    decoded = lm.tokenizer.decode_batch(texts, skip_special_tokens=False)
    sizes = np.array([max(float(len(text.encode())), NO_BYTES) for text in decoded])
    if len(documents) == len(tokens) - 1:  # the bytes of the first token count too
        sizes *= n_bytes / sizes.sum()
    return clusters, cluster, sizes
