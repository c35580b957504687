"""Checkpoints on a text: its tokens for the tokenizer of each, and the comparison of two checkpoints by documents."""

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tril.data.config import DataConfig
from tril.data.prepare import PreparedText, prepare
from tril.data.sources.base import Split
from tril.data.tokenizer import TokenizerConfig
from tril.model.checkpoint import Checkpoint
from tril.model.comparison import Bound, Comparison, compare
from tril.model.evaluation.scored_text import ScoredText
from tril.model.formats import markdown_table, plural
from tril.model.generation.language_model import LanguageModel
from tril.model.intervals import MIN_DOCUMENTS, mean_and_ends

Part = Literal["val", "all"]


@dataclass(frozen=True)
class EvaluatedText:
    """A text in the tokens of a checkpoint.

    Attributes:
        tokens: (number of tokens,) ids.
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
        splits: tuple[Literal["train", "val"], ...] = ("train", "val") if part == "all" else ("val",)
        tokens, counts = np.concatenate([prepared.tokens(split) for split in splits]), prepared.meta["counts"]
        if len(tokens) < 2:
            raise ValueError(f"{name} has {len(tokens)} tokens, at least 2 are needed; give more text")
        n_bytes, n_unknown = (sum(counts[split][key] for split in splits) for key in ("bytes", "unknown"))
        return cls(tokens, name, n_bytes, n_unknown, prepared.meta["fingerprint"])

    def describe(self) -> dict[str, Any]:
        sizes = {"tokens": len(self.tokens), "bytes": self.n_bytes, "unknown_tokens": self.n_unknown}
        return {"name": self.name, "fingerprint": self.fingerprint} | sizes


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

    def read_text(self, data: DataConfig, part: Part, name: str) -> EvaluatedText:
        """A text in the tokens of the checkpoint."""
        train = data.token_budget if part == "all" else 1  # the least that `prepare` encodes of the training part
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(self.checkpoint.tokenizer, encoding="utf-8")
            tokenizer = TokenizerConfig(kind="file", path=str(path), eot=self.checkpoint.eot)
            budgets: dict[Split, int | None] = {"train": train, "val": data.val_token_budget}
            prepared = prepare(data.source, tokenizer, budgets, data.cache_dir, progress=False)
        return EvaluatedText.of(prepared, part, name)

    def score(self, text: EvaluatedText) -> ScoredText:
        return ScoredText.of(self.lm, text.tokens, text.n_bytes, document_eot=self.document_eot)


def evaluate_texts(subjects: Sequence[Subject], texts: Sequence[EvaluatedText]) -> tuple[dict[str, Any], str]:
    """The figures of one or two checkpoints on a text, in the tokens of each, and a table of them.

    Raises:
        ValueError: as `compare_texts`.
    """
    scored = [subject.score(text) for subject, text in zip(subjects, texts, strict=True)]
    sides = [
        subject.describe() | {"text": text.describe()} | each.report()
        for subject, text, each in zip(subjects, texts, scored, strict=True)
    ]
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
        unit: compare((nats[:, kept] / size[kept])[:, None], size[kept], bound=Bound.MODELS)[0]
        for unit, size in sizes.items()
    }
