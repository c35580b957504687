"""A text as scored by a model, and its figures, each with an interval over the documents of the text.

Letters: M targets (tokens but the first), T context length, G clusters (documents, or blocks of windows of a text with
few documents).
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

NO_BYTES = 1e-9  # the size of a cluster without text, such as one end-of-text token, so that its bits count


@dataclass(frozen=True)
class ScoredText:
    """The targets in the order of the text, as arrays (M,), and their clusters.

    Attributes:
        length: T. Windows of T inputs do not overlap, as in validation.
        nll, correct: see `Scores`.
        clusters: of the targets, in rows of T.
        bytes: (G,) float64, the UTF-8 bytes of each cluster's targets.
    """

    length: int
    nll: np.ndarray
    correct: np.ndarray
    clusters: TextClusters
    bytes: np.ndarray

    @classmethod
    def of(
        cls, lm: LanguageModel, tokens: np.ndarray, n_bytes: int, *, document_eot: int | None = None
    ) -> "ScoredText":
        """Scores the text in windows as long as the context.

        Args:
            tokens: (M + 1,) ids of the text.
            n_bytes: of the text.
            document_eot: see `score_windows`.
        """
        length = lm.config.context_length
        windows = [tokens[start : start + length + 1] for start in range(0, len(tokens) - 1, length)]
        scores = score_windows(lm.model, [(ids, len(ids) - 1) for ids in windows], document_eot=document_eot)
        clusters = find_clusters(tokens, lm.eot_id, length)
        sizes = count_bytes(lm, tokens[1:], clusters)
        sizes *= n_bytes / sizes.sum()  # the bytes of the first token count too
        nll, correct = map(np.concatenate, zip(*scores, strict=True))
        return cls(length, nll, correct, clusters, sizes)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums values (M,) over each cluster: (G,)."""
        cluster = self.clusters.numbers.flatten().numpy()[: len(self.nll)]  # (M,)
        return np.bincount(cluster, values, len(self.bytes))

    def mean(self, values: np.ndarray) -> Interval:
        """Mean of values (M,) over all targets."""
        return clustered_mean(self.sums(values.astype(float)), self.sums(np.ones(len(values)))).interval()

    def bits_per_byte(self, nats: np.ndarray) -> ClusteredMean:
        """Bits per byte of losses, or of differences of losses, with the sums (G,) in nats."""
        return clustered_mean(nats / math.log(2), self.bytes)

    def figures(self) -> dict[str, Interval]:
        """The figures by name, with 95 % intervals over the clusters."""
        loss = self.mean(self.nll)
        with np.errstate(over="ignore"):
            perplexity = loss.map(lambda end: float(np.exp(end)))
        return {
            "loss": loss,
            "perplexity": perplexity,
            "bits_per_byte": self.bits_per_byte(self.sums(self.nll)).interval(),
            "accuracy": self.mean(self.correct).map(lambda end: min(1.0, max(0.0, end))),
        }

    def report(self) -> dict[str, Any]:
        """What evaluation.json says of it."""
        unit = {"unit": self.clusters.unit, "described": self.clusters.describe()}
        return {
            "context_length": self.length,
            "windows": -(-len(self.nll) // self.length),
            "targets": len(self.nll),
            "observations": unit | self.clusters.counts(),
            "figures": self.figures(),
        }


def find_clusters(tokens: np.ndarray, eot_id: int, length: int) -> TextClusters:
    """The clusters of the targets of a text, in rows of `length`; a target belongs to the document of its input."""
    documents, targets = np.cumsum(tokens == eot_id)[:-1], tokens[1:].astype(np.int64)  # (M,)
    filled = -len(documents) % length
    rows = torch.from_numpy(np.pad(documents, (0, filled), mode="edge")).view(-1, length)
    return TextClusters.of(rows, torch.from_numpy(np.pad(targets, (0, filled), constant_values=IGNORE)).view_as(rows))


def count_bytes(lm: LanguageModel, targets: np.ndarray, clusters: TextClusters) -> np.ndarray:
    """The UTF-8 bytes of the decoded targets (M,) of each cluster, without end-of-text: (G,) float64."""
    cluster = clusters.numbers.flatten().numpy()[: len(targets)]
    order, ends = np.argsort(cluster, kind="stable"), np.cumsum(np.bincount(cluster, minlength=len(clusters.targets)))
    texts = [ids[ids != lm.eot_id].tolist() for ids in np.split(targets[order], ends[:-1])]
    decoded = lm.tokenizer.decode_batch(texts, skip_special_tokens=False)
    return np.array([max(float(len(text.encode())), NO_BYTES) for text in decoded])
