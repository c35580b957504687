"""Evaluates checkpoints on a text: reads it in the tokens of each, scores these, and reports one checkpoint or two.

Letters: N windows, T context length, M targets (tokens but the first), V vocabulary, G clusters (documents, or blocks
of windows of a text with few documents).
"""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from tril.data.batches import IGNORE
from tril.data.cache import PROGRESS
from tril.data.prepare import PreparedText, prepare
from tril.data.settings import unflatten
from tril.data.sources import parse
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig
from tril.model.atomic_files import write_text
from tril.model.checkpoint import Checkpoint
from tril.model.comparison import Comparison, compare
from tril.model.formats import markdown_table, plural
from tril.model.generation.generate import TOKENS_PER_BATCH, inference
from tril.model.generation.language_model import LanguageModel
from tril.model.intervals import Interval, clustered_mean, mean_and_ends
from tril.model.masks import document_options
from tril.model.text_clusters import TextClusters

Part = Literal["val", "all"]
NO_BYTES = 1e-9  # the size of a cluster without text, such as one end-of-text token, so that its bits count


def text_of_run(checkpoint: Checkpoint) -> PreparedText:
    """The text that a checkpoint was trained on.

    Raises:
        ValueError: it has changed since, or the checkpoint does not name it.
    """
    if not (settings := unflatten(checkpoint.settings).get("data")):
        raise ValueError(f"{checkpoint.path} does not say on which text it was trained; name a run")
    prepared = prepare(parse(settings))
    now, before = prepared.meta["fingerprint"][:12], str(checkpoint.data.get("fingerprint"))[:12]
    if now != before:
        changed = f"the text has changed since the run (fingerprint {now} instead of {before})"
        raise ValueError(f"{changed}; restore it, or train again")
    return prepared


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
        """Scores the text in windows as long as the context, which do not overlap, as in validation; with a bar.

        Args:
            tokens: (M + 1,) ids of the text.
            n_bytes: of its targets.
            document_eot: id of the token that opens a document, if the model was trained with separate documents; None:
                a window is one text.
        """
        length = lm.config.context_length
        inputs, targets = in_rows(tokens[:-1], length), in_rows(tokens[1:], length, constant_values=IGNORE)  # (N, T)
        documents = in_rows(np.cumsum(tokens == lm.eot_id)[:-1], length, mode="edge")  # of each input, and its target
        model, scores, size = lm.model, [], max(1, TOKENS_PER_BATCH // length)
        bar = tqdm(total=len(inputs), desc="evaluation", unit=" windows", **PROGRESS)
        with inference(model), bar:
            for ids, expected in zip(inputs.split(size), targets.split(size), strict=True):
                longest = int((expected != IGNORE).sum(1).max())  # below T in the last window
                ids, expected = (x[:, :longest].to(model.embed.weight.device) for x in (ids, expected))
                scored = expected != IGNORE
                hidden = model.hidden(ids, **document_options(ids, document_eot))[scored]  # (targets, C)
                logits, expected = model.logits(hidden).float(), expected[scored]  # (targets, V), (targets,)
                nll = F.cross_entropy(logits, expected, reduction="none")  # as in GPT.nll
                scores.append((nll.cpu(), (logits.argmax(-1) == expected).cpu()))
                bar.update(len(ids))
        nll, correct = (torch.cat(each).numpy() for each in zip(*scores, strict=True))
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

    def compare(self, other: "ScoredText") -> dict[str, Comparison]:
        """The model of `other`, which was scored on the same tokens, compared with this one, paired by cluster."""
        # The targets are the same, so both have these clusters, whatever their context lengths.
        nats, targets = np.stack([self.sums(self.nll), self.sums(other.nll)]), self.clusters.targets.numpy()  # (2, G)
        sizes, kept = {"nats per token": targets, "bits per byte": self.bytes * math.log(2)}, targets > 0  # (G,)
        return {
            unit: compare((nats / size)[:, None, kept], size[kept], of_models=True)[0] for unit, size in sizes.items()
        }


def in_rows(values: np.ndarray, length: int, **padding) -> Tensor:
    """Values (M,) as int64 (N, T), padded at the end by `np.pad`."""
    padded = np.pad(values.astype(np.int64), (0, -len(values) % length), **padding)
    return torch.from_numpy(padded).view(-1, length)


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
        return cls(checkpoint, lm)

    @property
    def document_eot(self) -> int | None:
        """As in training."""
        return self.lm.eot_id if self.checkpoint.settings.get("data.document_mask") else None

    def read_text(self, data: Source, part: Part) -> PreparedText:
        """A text in the tokens of the checkpoint."""
        train = data.token_budget if part == "all" else 1  # the least that `prepare` encodes of the training part
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            write_text(path, self.checkpoint.tokenizer)
            tokenizer = TokenizerConfig(kind="file", path=str(path), eot=self.checkpoint.eot)
            return prepare(replace(data, tokenizer=tokenizer, token_budget=train), progress=False)

    def score(self, prepared: PreparedText, part: Part, name: str) -> tuple[dict[str, Any], ScoredText]:
        """What evaluation.json says of the checkpoint on a text, and its scores.

        Bits per byte are those of training: the bits of the targets, divided by the bytes of the text after its first
        token, which nothing predicts.

        Args:
            name: which text it is, for the reader.

        Raises:
            ValueError: the text has one token, so no target.
        """
        splits: tuple[Split, ...] = ("train", "val") if part == "all" else ("val",)
        tokens, counts = np.concatenate([prepared.tokens(split) for split in splits]), prepared.meta["counts"]
        if len(tokens) < 2:
            raise ValueError(f"{name} has {len(tokens)} tokens, at least 2 are needed; give more text")
        n_bytes, n_unknown = (sum(counts[split][key] for split in splits) for key in ("bytes", "unknown"))
        n_predicted = n_bytes - counts["train"]["first_bytes"] if part == "all" else prepared.val_bytes(len(tokens) - 1)
        scored = ScoredText.of(self.lm, tokens, n_predicted, document_eot=self.document_eot)
        clusters, length = scored.clusters, self.lm.config.context_length
        sizes = {"tokens": len(tokens), "bytes": n_bytes, "unknown_tokens": n_unknown}
        report = {
            "checkpoint": os.path.relpath(str(self.checkpoint.path)),
            "steps": self.checkpoint.step,
            "parameters": self.lm.model.n_parameters(),
            "document_mask": self.document_eot is not None,
            "text": {"name": name, "fingerprint": prepared.meta["fingerprint"]} | sizes,
            "context_length": length,
            "windows": len(clusters.numbers),
            "targets": len(scored.nll),
            "observations": {"unit": clusters.unit, "described": clusters.describe()} | clusters.counts(),
            "figures": scored.figures(),
        }
        return report, scored


def evaluate_texts(subjects: Sequence[Subject], source: Source | None, part: Part) -> tuple[dict[str, Any], str]:
    """The figures of one or two checkpoints on a text, and a table of them.

    Args:
        source: the text; None: that of the run of the first checkpoint.

    Raises:
        ValueError: the text has changed since the run, or is too short; or the checkpoints have two tokenizers, so that
            their losses are of different tokens.
    """
    first, last = subjects[0].checkpoint, subjects[-1].checkpoint
    if (first.tokenizer, first.eot) != (last.tokenizer, last.eot):
        remedy = "evaluate each alone, and compare the bits per byte"
        raise ValueError(f"other={last.path} has another tokenizer than {first.path}; {remedy}")
    of = "the run" if source is None else f"data.source={source.name}"
    name = f"the {'validation part' if part == 'val' else 'whole text'} of {of}"
    text = text_of_run(first) if source is None else subjects[0].read_text(source, part)
    sides, scored = zip(*(subject.score(text, part, name) for subject in subjects), strict=True)
    report, keys, differences = dict(sides[0]), ("ckpt", "other")[: len(sides)], {}
    if len(subjects) > 1:
        differences = scored[0].compare(scored[1])
        report |= {"other": sides[1], "other_minus_checkpoint": differences}
    table = [["", *keys]]
    for figure in sides[0]["figures"]:
        table.append([figure.replace("_", " "), *(mean_and_ends(side["figures"][figure]) for side in sides)])
    lines = [name, "", markdown_table(table), ""]
    for key, side in zip(keys, sides, strict=True):
        sizes = f"{side['targets']:,} targets in windows of {side['context_length']} tokens"
        lines.append(f"{key}: {side['checkpoint']}, {sizes}; 95% intervals over {side['observations']['described']}")
        if n_unknown := side["text"]["unknown_tokens"]:
            lines.append(f"  {plural(n_unknown, 'token')} of the text are unknown; bits per byte are too low")
    for unit, row in differences.items():
        lines.append(f"other - ckpt, paired: {mean_and_ends(row.difference, '+')} {unit}: {row.verdict}")
    return report, "\n".join(lines)
