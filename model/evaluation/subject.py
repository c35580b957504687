"""Checkpoints on a text: the losses of its tokens, figures with intervals over its documents, and two checkpoints.

Letters: M targets (tokens but the first), T context length, G clusters (documents, or blocks of windows of a text with
few documents).
"""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tril.data.config import DataConfig, parse
from tril.data.prepare import PreparedText, prepare
from tril.data.settings import unflatten
from tril.data.sources.base import Split
from tril.data.tokenizer import TokenizerConfig
from tril.model.checkpoint import Checkpoint
from tril.model.comparison import Comparison, compare
from tril.model.evaluation.scores import score_windows
from tril.model.formats import markdown_table, plural
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import IGNORE
from tril.model.intervals import MIN_DOCUMENTS, Interval, clustered_mean, mean_and_ends
from tril.model.text_clusters import TextClusters

NO_BYTES = 1e-9  # the size of a cluster without text, such as one end-of-text token, so that its bits count
Part = Literal["val", "all"]


@dataclass(frozen=True)
class EvaluatedText:
    """A text in the tokens of a checkpoint.

    Attributes:
        tokens: (M + 1,) ids.
        name: which text it is, for the reader.
        n_bytes: UTF-8 bytes of the text.
        n_unknown: tokens that stand for characters that the tokenizer does not have.
        fingerprint: of text, split and tokenizer.
    """

    tokens: np.ndarray
    name: str
    n_bytes: int
    n_unknown: int
    fingerprint: str

    @classmethod
    def of(cls, prepared: PreparedText, part: Part, name: str) -> "EvaluatedText":
        """Raises ValueError for a text of one token, which has no target."""
        splits: tuple[Split, ...] = ("train", "val") if part == "all" else ("val",)
        tokens, counts = np.concatenate([prepared.tokens(split) for split in splits]), prepared.meta["counts"]
        if len(tokens) < 2:
            raise ValueError(f"{name} has {len(tokens)} tokens, at least 2 are needed; give more text")
        n_bytes, n_unknown = (sum(counts[split][key] for split in splits) for key in ("bytes", "unknown"))
        return cls(tokens, name, n_bytes, n_unknown, prepared.meta["fingerprint"])


def text_of_run(checkpoint: Checkpoint) -> tuple[DataConfig, PreparedText]:
    """The text that a checkpoint was trained on.

    Raises:
        ValueError: it has changed since, or the checkpoint does not name it.
    """
    if not (settings := unflatten(checkpoint.settings).get("data")):
        raise ValueError(f"{checkpoint.path} does not say on which text it was trained; name a run")
    prepared = (data := parse(settings)).prepare()
    now, before = prepared.meta["fingerprint"][:12], checkpoint.data["fingerprint"][:12]
    if now != before:
        changed = f"the text has changed since the run (fingerprint {now} instead of {before})"
        raise ValueError(f"{changed}; restore it, or train again")
    return data, prepared


@dataclass(frozen=True)
class ScoredText:
    """The targets in the order of the text, as arrays (M,), and their clusters.

    Attributes:
        nll, correct: see `Scores`.
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
        return cls(nll, correct, clusters, sizes)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sums values (M,) over each cluster: (G,)."""
        cluster = self.clusters.numbers.flatten().numpy()[: len(values)]  # (M,)
        return np.bincount(cluster, values, len(self.bytes))

    def figures(self) -> dict[str, Interval]:
        """The figures by name, with 95 % intervals over the clusters."""
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


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is evaluated, with its model."""

    checkpoint: Checkpoint
    lm: LanguageModel

    @classmethod
    def of(cls, path: Path, device: str) -> "Subject":
        """Loads the model.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no checkpoint, its weights are not finite, or it has no causal mask, so that its losses
                use the tokens that they predict.
        """
        checkpoint = Checkpoint.read(path)
        if not checkpoint.config.causal:
            cause = "has model.causal=false, so its losses use the tokens that they predict"
            raise ValueError(f"{path} {cause}; name a run with the causal mask")
        lm = checkpoint.language_model(device)
        lm.check_finite(path)
        lm.tokenizer.encode_special_tokens = True  # a text that contains <|endoftext|> is one text
        return cls(checkpoint, lm)

    @property
    def document_eot(self) -> int | None:
        """As in training."""
        return self.lm.eot_id if self.checkpoint.settings.get("data.document_mask") else None

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": os.path.relpath(str(self.checkpoint.path)),
            "steps": self.checkpoint.step,
            "parameters": self.lm.model.n_parameters(),
            "document_mask": self.document_eot is not None,
        }

    def same_tokenizer(self, other: "Subject") -> bool:
        a, b = self.checkpoint, other.checkpoint
        return (a.tokenizer, a.eot) == (b.tokenizer, b.eot)

    def read_text(self, data: DataConfig, part: Part) -> PreparedText:
        """A text in the tokens of the checkpoint."""
        train = data.token_budget if part == "all" else 1  # the least that `prepare` encodes of the training part
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(self.checkpoint.tokenizer, encoding="utf-8")
            tokenizer = TokenizerConfig(kind="file", path=str(path), eot=self.checkpoint.eot)
            budgets: dict[Split, int | None] = {"train": train, "val": data.val_token_budget}
            return prepare(data.source, tokenizer, budgets, data.cache_dir, progress=False)

    def report(self, text: EvaluatedText, scored: ScoredText) -> dict[str, Any]:
        """What evaluation.json says of the checkpoint on a text."""
        clusters, length, n_targets = scored.clusters, self.lm.config.context_length, len(scored.nll)
        sizes = {"tokens": len(text.tokens), "bytes": text.n_bytes, "unknown_tokens": text.n_unknown}
        return self.describe() | {
            "text": {"name": text.name, "fingerprint": text.fingerprint} | sizes,
            "context_length": length,
            "windows": -(-n_targets // length),
            "targets": n_targets,
            "observations": {"unit": clusters.unit, "described": clusters.describe()} | clusters.counts(),
            "figures": scored.figures(),
        }


def evaluate_texts(subjects: Sequence[Subject], source: DataConfig | None, part: Part) -> tuple[dict[str, Any], str]:
    """The figures of one or two checkpoints on a text, in the tokens of each, and a table of them.

    Args:
        source: the text; None: that of the run of the first checkpoint.

    Raises:
        ValueError: the text has changed since the run, or is too short; and as `compare_texts`.
    """
    first, of = subjects[0], "the run" if source is None else f"data.source={source.source.name}"
    name, texts = f"the {'validation part' if part == 'val' else 'whole text'} of {of}", list[EvaluatedText]()
    data, of_run = (source, None) if source is not None else text_of_run(first.checkpoint)
    for subject in subjects:
        same = of_run if subject.same_tokenizer(first) else None
        texts.append(EvaluatedText.of(same or subject.read_text(data, part), part, name))
    pairs = list(zip(subjects, texts, strict=True))
    scored = [ScoredText.of(s.lm, text.tokens, text.n_bytes, document_eot=s.document_eot) for s, text in pairs]
    sides = [subject.report(text, each) for (subject, text), each in zip(pairs, scored, strict=True)]
    report, keys, differences = dict(sides[0]), ("ckpt", "other")[: len(sides)], {}
    if len(subjects) > 1:
        differences = compare_texts(*scored, same_tokenizer=subjects[0].same_tokenizer(subjects[1]))
        report |= {"other": sides[1], "other_minus_checkpoint": differences}
    table = [["", *keys]]
    for figure in sides[0]["figures"]:
        table.append([figure.replace("_", " "), *(mean_and_ends(side["figures"][figure]) for side in sides)])
    lines = [texts[0].name, "", markdown_table(table), ""]
    for key, side in zip(keys, sides, strict=True):
        sizes = f"{side['targets']:,} targets in windows of {side['context_length']} tokens"
        lines.append(f"{key}: {side['checkpoint']}, {sizes}; 95 % intervals over {side['observations']['described']}")
        if n_unknown := side["text"]["unknown_tokens"]:
            lines.append(f"  {plural(n_unknown, 'token')} of the text are unknown; bits per byte are too low")
    for unit, row in differences.items():
        lines.append(f"other - ckpt, paired: {mean_and_ends(row.difference, '+')} {unit}: {row.verdict}")
    return report, "\n".join(lines)


def compare_texts(a: ScoredText, b: ScoredText, *, same_tokenizer: bool) -> dict[str, Comparison]:
    """The second model compared with the first, paired by cluster, for each unit.

    Raises:
        ValueError: texts with other tokens, which are paired by document, do not have the same documents.
    """
    counts = [(text.clusters.n_documents, round(text.bytes.sum())) for text in (a, b)]
    if not same_tokenizer and (counts[0] != counts[1] or counts[0][0] < MIN_DOCUMENTS):
        sizes = " and ".join(f"{n} of {n_bytes:,} bytes" for n, n_bytes in counts)
        cause = f"with other tokenizers only the same documents can be paired, at least {MIN_DOCUMENTS}"
        raise ValueError(f"{cause}; they find {sizes}; give a text of more documents, without a budget of tokens")
    # With equal tokens the targets are the same, so both have the clusters of a, whatever their context lengths.
    nats = np.stack([a.sums(a.nll), (a if same_tokenizer else b).sums(b.nll)])  # (2, G)
    sizes = {"nats per token": a.clusters.targets.numpy()} if same_tokenizer else {}
    sizes["bits per byte"] = a.bytes * math.log(2)  # nats for each bit of a byte
    kept = a.clusters.targets.numpy() > 0
    return {
        unit: compare((nats[:, kept] / size[kept])[:, None], size[kept], of_models=True)[0]
        for unit, size in sizes.items()
    }
