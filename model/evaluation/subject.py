"""Checkpoints on a text: its tokens for the tokenizer of each, and the comparison of two checkpoints by documents."""

import ast
import os
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from tril.data.config import DataConfig
from tril.data.mixture import Mixture
from tril.data.prepare import prepare
from tril.data.prepared import PreparedText
from tril.data.tokenizer import TokenizerConfig
from tril.model.checkpoint import Checkpoint
from tril.model.evaluation.pairs import wilson
from tril.model.evaluation.scored_text import ScoredText
from tril.model.generation.language_model import LanguageModel
from tril.model.intervals import MIN_DOCUMENTS, Interval

Part = Literal["val", "all"]
CODE = "stdlib"  # the source whose text is Python
SPLIT = {"val_fraction", "split"}  # entries of a source's fingerprint that only split its text
SAMPLING = {"max_new_tokens": 256, "temperature": 0.8, "top_k": 50}  # as scripts/sample.py
SAMPLES_PER_BATCH = 32


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

    def n_documents(self, eot_id: int) -> int:
        """Documents that contain a token with a target."""
        return int((self.tokens[1:-1] == eot_id).sum()) + 1

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
    def length(self) -> int:
        return self.lm.config.context_length

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

    def check_stride(self, stride: int | None) -> None:
        """Raises ValueError for a stride that would leave out tokens."""
        if stride is not None and stride > self.length:
            limit = f"the context length of {self.checkpoint.path}, {self.length}"
            raise ValueError(f"stride={stride} exceeds {limit}; lower it")

    def read_text(self, data: DataConfig, part: Part, name: str | None = None) -> EvaluatedText:
        """A text in the tokens of the checkpoint.

        Args:
            name: None: from `data`, with a remark if it may contain text that the model was trained on.
        """
        assert not isinstance(data.source, Mixture), "a mixture is several texts"
        budget = data.token_budget if part == "all" else 1  # the least that `prepare` encodes of the training part
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            path.write_text(self.checkpoint.tokenizer, encoding="utf-8")
            tokenizer = TokenizerConfig(kind="file", path=str(path), eot=self.checkpoint.eot)
            budgets = {"token_budget": budget, "val_token_budget": data.val_token_budget}
            prepared = prepare(data.source, tokenizer, data.cache_dir, progress=False, **budgets)
        if name is None:
            name = f"the {'whole text' if part == 'all' else 'validation part'} of data.source={data.source.name}"
            if self._may_know(prepared.meta["source"], part):
                name += ", which may contain training text of the checkpoint"
        return EvaluatedText.of(prepared, part, name)

    def _may_know(self, source: dict[str, Any], part: Part) -> bool:
        """Whether a text is one of the checkpoint, and not its validation part."""
        trained = self.checkpoint.data.get("source", {})
        same = [each for each in trained.get("sources", {"": trained}).values() if _whole(each) == _whole(source)]
        return bool(same) and (part == "all" or source not in same)

    def score(self, text: EvaluatedText, *, stride: int | None = None, limit: int | None = None) -> ScoredText:
        """Scores a text in windows that do not overlap, or that slide by `stride`; see `ScoredText.of`."""
        options = {"stride": stride, "limit": limit, "document_eot": self.document_eot}
        return ScoredText.of(self.lm, text.tokens, text.n_bytes, **options)

    def check_samples_code(self, n: int) -> None:
        """Raises ValueError unless the model was trained on Python code."""
        if self.checkpoint.data.get("source", {}).get("kind") != CODE:
            raise ValueError(f"samples={n} needs a model of Python code, a run with data={CODE}; leave it out")

    def parsing_samples(self, n: int) -> dict[str, Any]:
        """The share of n samples, each from the start of a text, that parse as Python."""
        texts = []
        for seed, first in enumerate(range(0, n, SAMPLES_PER_BATCH)):
            texts += self.lm.generate([""] * min(SAMPLES_PER_BATCH, n - first), seed=seed, **SAMPLING)
        parsed = sum(map(parses, texts))
        remark = "a sample without a statement does not count as parsed; one that reaches max_new_tokens is cut there"
        return {"n": n, "parsed": parsed, "share": wilson(parsed, n), "sampling": SAMPLING, "remark": remark}


def _whole(source: dict[str, Any]) -> dict[str, Any]:
    """A source's fingerprint without its split."""
    return {key: value for key, value in source.items() if key not in SPLIT}


def parses(code: str) -> bool:
    """Whether a text is Python code with at least one statement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd literals, such as "\\d"
        try:
            return bool(ast.parse(code).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # null bytes; too many nested brackets
            return False


def check_comparable(subjects: Sequence[Subject], texts: Sequence[EvaluatedText], limit: int | None) -> None:
    """Raises ValueError if the losses of two checkpoints cannot be paired."""
    (a, b), pair = subjects, " and ".join(str(subject.checkpoint.path) for subject in subjects)
    if a.same_tokenizer(b):
        if limit is not None and a.length != b.length:
            cause = f"other windows of the two context lengths, {a.length} and {b.length}"
            raise ValueError(f"limit={limit} would choose {cause}; leave it out")
        return
    if limit is not None:
        raise ValueError(f"limit={limit} would choose other text for the two tokenizers of {pair}; leave it out")
    if texts[0].n_bytes != texts[1].n_bytes:
        sizes = f"{texts[0].n_bytes:,} and {texts[1].n_bytes:,} bytes"
        cause = f"the budget of tokens gives the two tokenizers of {pair} other texts"
        raise ValueError(f"{cause}, {sizes}; give data= without data.val_token_budget and data.token_budget")
    documents = [text.n_documents(subject.lm.eot_id) for text, subject in zip(texts, subjects, strict=True)]
    if documents[0] != documents[1] or documents[0] < MIN_DOCUMENTS:
        found = f"the text has {documents[0]}, with the other one {documents[1]}"
        raise ValueError(
            f"{pair} have other tokenizers, so only documents can be paired, at least {MIN_DOCUMENTS}; {found}; "
            "give a text of more documents"
        )


def compare(a: ScoredText, b: ScoredText, *, equal_tokens: bool) -> dict[str, dict[str, Any]]:
    """The losses of the second model minus those of the first, paired by cluster, for each unit."""
    # With equal tokens the targets are the same, so both have the clusters of a, whatever their context lengths.
    nats = (a if equal_tokens else b).sums(b.nll) - a.sums(a.nll)  # (G,)
    assert not equal_tokens or (a.inputs == b.inputs).all()
    differences = {"nats per token": a.clusters.mean(torch.from_numpy(nats))} if equal_tokens else {}
    differences["bits per byte"] = a.bits_per_byte(nats)
    intervals = {unit: mean.interval() for unit, mean in differences.items()}
    return {unit: {"difference": interval, "other_is": verdict(interval)} for unit, interval in intervals.items()}


def verdict(difference: Interval) -> str:
    """Of the losses of two models, the second minus the first."""
    if difference.low is None or difference.high is None:
        return "no interval"
    if difference.low <= 0 <= difference.high:
        return "not distinguishable"
    return "higher" if difference.mean > 0 else "lower"
