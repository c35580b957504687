"""Evaluates checkpoints on a text: reads the text in the tokens of each, and reports one checkpoint or two.

M targets (tokens but the first).
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tril.data.prepare import PreparedText, prepare
from tril.data.settings import unflatten
from tril.data.sources import parse
from tril.data.sources.base import Source, Split
from tril.data.tokenizer import TokenizerConfig
from tril.model.checkpoint import Checkpoint
from tril.model.evaluation.scores import ScoredText
from tril.model.formats import markdown_table, plural
from tril.model.generation.language_model import LanguageModel
from tril.model.intervals import MIN_DOCUMENTS, mean_and_ends

Part = Literal["val", "all"]


def text_of_run(checkpoint: Checkpoint) -> tuple[Source, PreparedText]:
    """The text that a checkpoint was trained on.

    Raises:
        ValueError: it has changed since, or the checkpoint does not name it.
    """
    if not (settings := unflatten(checkpoint.settings).get("data")):
        raise ValueError(f"{checkpoint.path} does not say on which text it was trained; name a run")
    prepared = prepare(data := parse(settings))
    now, before = prepared.meta["fingerprint"][:12], str(checkpoint.data.get("fingerprint"))[:12]
    if now != before:
        changed = f"the text has changed since the run (fingerprint {now} instead of {before})"
        raise ValueError(f"{changed}; restore it, or train again")
    return data, prepared


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

    def read_text(self, data: Source, part: Part) -> PreparedText:
        """A text in the tokens of the checkpoint."""
        train = data.token_budget if part == "all" else 1  # the least that `prepare` encodes of the training part
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(self.checkpoint.tokenizer, encoding="utf-8")
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
        report = self.describe() | {
            "text": {"name": name, "fingerprint": prepared.meta["fingerprint"]} | sizes,
            "context_length": length,
            "windows": len(clusters.numbers),
            "targets": len(scored.nll),
            "observations": {"unit": clusters.unit, "described": clusters.describe()} | clusters.counts(),
            "figures": scored.figures(),
        }
        return report, scored


def evaluate_texts(subjects: Sequence[Subject], source: Source | None, part: Part) -> tuple[dict[str, Any], str]:
    """The figures of one or two checkpoints on a text, in the tokens of each, and a table of them.

    Args:
        source: the text; None: that of the run of the first checkpoint.

    Raises:
        ValueError: the text has changed since the run, or is too short; or two tokenizers do not find the same
            documents in it, which alone can be paired.
    """
    first, of = subjects[0], "the run" if source is None else f"data.source={source.name}"
    name = f"the {'validation part' if part == 'val' else 'whole text'} of {of}"
    data, of_run = (source, None) if source is not None else text_of_run(first.checkpoint)
    same = [of_run if subject.same_tokenizer(first) else None for subject in subjects]
    texts = [text or subject.read_text(data, part) for text, subject in zip(same, subjects, strict=True)]
    pairs = [subject.score(text, part, name) for text, subject in zip(texts, subjects, strict=True)]
    sides, scored = zip(*pairs, strict=True)
    report, keys, differences = dict(sides[0]), ("ckpt", "other")[: len(sides)], {}
    if len(subjects) > 1:
        if not (same_tokenizer := subjects[1].same_tokenizer(first)):
            check_documents(*((side["observations"]["documents"], side["text"]["bytes"]) for side in sides))
        differences = scored[0].compare(scored[1], same_tokenizer=same_tokenizer)
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


def check_documents(a: tuple[int, int], b: tuple[int, int]) -> None:
    """Raises ValueError if the documents and bytes that two tokenizers find in a text do not allow to pair them."""
    if a != b or a[0] < MIN_DOCUMENTS:
        sizes = " and ".join(f"{n} of {n_bytes:,} bytes" for n, n_bytes in (a, b))
        cause = f"with other tokenizers only the same documents can be paired, at least {MIN_DOCUMENTS}"
        raise ValueError(f"{cause}; they find {sizes}; give a text of more documents, without a budget of tokens")
