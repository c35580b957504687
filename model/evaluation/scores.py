"""What a model predicts for the tokens of a text, as figures with intervals over the documents of the text.

Letters: N windows, T context length, M targets (tokens but the first), V vocabulary, G clusters (documents, or blocks
of windows of a text with few documents).
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tril.data.cache import PROGRESS
from tril.model.comparison import Comparison, compare
from tril.model.generation.generate import TOKENS_PER_BATCH, inference
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import IGNORE
from tril.model.intervals import Interval, clustered_mean
from tril.model.masks import document_options
from tril.model.text_clusters import TextClusters

NO_BYTES = 1e-9  # the size of a cluster without text, such as one end-of-text token, so that its bits count


@dataclass(frozen=True)
class ScoredText:
    """The targets in the order of the text, as arrays (M,), and their clusters.

    Attributes:
        nll: float32, the loss in nats.
        correct: bool, whether the target is the most probable token.
        clusters: of the targets, in rows of T.
        bytes: (G,) float64, the UTF-8 bytes of each cluster's targets.
    """

    nll: np.ndarray
    correct: np.ndarray
    clusters: TextClusters
    bytes: np.ndarray

    @classmethod
    def of(
        cls, lm: LanguageModel, tokens: np.ndarray, n_bytes: int, *, document_eot: int | None = None
    ) -> "ScoredText":
        """Scores the text in windows as long as the context, which do not overlap, as in validation.

        Args:
            tokens: (M + 1,) ids of the text.
            n_bytes: of its targets.
            document_eot: id of the token that opens a document, if the model was trained with separate documents; None:
                a window is one text.
        """
        length = lm.config.context_length
        inputs, targets = in_rows(tokens[:-1], length), in_rows(tokens[1:], length, constant_values=IGNORE)  # (N, T)
        documents = in_rows(np.cumsum(tokens == lm.eot_id)[:-1], length, mode="edge")  # of each input, and its target
        nll, correct = score_windows(lm, inputs, targets, document_eot)
        clusters = TextClusters.of(documents, targets)
        sizes = count_bytes(lm, tokens[1:], clusters)
        return cls(nll, correct, clusters, sizes * (n_bytes / sizes.sum()))

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums values (M,) over each cluster: (G,)."""
        cluster = self.clusters.numbers.flatten().numpy()[: len(values)]  # (M,)
        return np.bincount(cluster, values, len(self.bytes))

    def figures(self) -> dict[str, Interval]:
        """The figures by name, with 95% intervals over the clusters."""
        nats, targets = self.sums(self.nll), self.clusters.targets.numpy()  # (G,)
        loss = clustered_mean(nats, targets).interval()
        accuracy = clustered_mean(self.sums(self.correct), targets).interval()
        with np.errstate(over="ignore"):
            perplexity = loss.map(lambda end: float(np.exp(end)))
        return {
            "loss": loss,
            "perplexity": perplexity,
            "bits_per_byte": clustered_mean(nats / math.log(2), self.bytes).interval(),
            "accuracy": accuracy.map(lambda end: min(1.0, max(0.0, end))),
        }

    def compare(self, other: "ScoredText", *, same_tokenizer: bool) -> dict[str, Comparison]:
        """The model of `other` compared with this one, paired by cluster, for each unit.

        Args:
            other: of the same text. With other tokens, both have the same documents.
        """
        # With equal tokens the targets are the same, so both have these clusters, whatever their context lengths.
        clustered, targets = self if same_tokenizer else other, self.clusters.targets.numpy()  # (G,)
        nats, kept = np.stack([self.sums(self.nll), clustered.sums(other.nll)]), targets > 0  # (2, G)
        sizes = {"nats per token": np.stack([targets, targets])} if same_tokenizer else {}
        sizes["bits per byte"] = np.stack([self.bytes, clustered.bytes]) * math.log(2)  # nats for each bit of a byte
        return {
            unit: compare((nats / size)[:, None, kept], size[0, kept], of_models=True)[0]
            for unit, size in sizes.items()
        }


def in_rows(values: np.ndarray, length: int, **padding) -> Tensor:
    """Values (M,) as int64 (N, T), padded at the end by `np.pad`."""
    padded = np.pad(values.astype(np.int64), (0, -len(values) % length), **padding)
    return torch.from_numpy(padded).view(-1, length)


def score_windows(
    lm: LanguageModel, inputs: Tensor, targets: Tensor, document_eot: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """`nll` and `correct` of the targets (N, T) that are not IGNORE, see `ScoredText`; on a terminal, with a bar."""
    model, scores = lm.model, []
    size = max(1, TOKENS_PER_BATCH // inputs.shape[1])
    with tqdm(total=len(inputs), desc="evaluation", unit=" windows", **PROGRESS) as bar:
        for ids, expected in zip(inputs.split(size), targets.split(size), strict=True):
            longest = int((expected != IGNORE).sum(1).max())  # below T in the last window
            ids, expected = (x[:, :longest].to(model.embed.weight.device) for x in (ids, expected))
            scored = expected != IGNORE
            with inference(model):
                hidden = model.hidden(ids, **document_options(ids, document_eot))[scored]  # (targets, C)
                logits, expected = model.logits(hidden).float(), expected[scored]  # (targets, V), (targets,)
                nll = F.cross_entropy(logits, expected, reduction="none")  # as in GPT.nll
                scores.append((nll.cpu(), (logits.argmax(-1) == expected).cpu()))
            bar.update(len(ids))
    nll, correct = (torch.cat(each).numpy() for each in zip(*scores, strict=True))
    return nll, correct


def count_bytes(lm: LanguageModel, targets: np.ndarray, clusters: TextClusters) -> np.ndarray:
    """The UTF-8 bytes of the decoded targets (M,) of each cluster, without end-of-text: (G,) float64."""
    cluster = clusters.numbers.flatten().numpy()[: len(targets)]
    order, ends = np.argsort(cluster, kind="stable"), np.cumsum(np.bincount(cluster, minlength=len(clusters.targets)))
    texts = [ids[ids != lm.eot_id].tolist() for ids in np.split(targets[order], ends[:-1])]
    decoded = lm.tokenizer.decode_batch(texts, skip_special_tokens=False)
    return np.array([max(float(len(text.encode())), NO_BYTES) for text in decoded])
