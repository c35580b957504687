"""Evaluates checkpoints on a text, and compares two of them by documents."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tril.scripts.common.evaluated_text import EvaluatedText, same_tokenizer
from tril.scripts.common.finished_run import Run

if TYPE_CHECKING:
    from tril.model.evaluation.scored_text import ScoredText
    from tril.model.generation.language_model import LanguageModel
    from tril.model.intervals import Interval

CODE = "stdlib"  # the source whose text is Python
SAMPLING = {"max_new_tokens": 256, "temperature": 0.8, "top_k": 50}  # as scripts/sample.py
SAMPLES_PER_BATCH = 32


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is evaluated."""

    run: Run
    lm: LanguageModel

    @classmethod
    def of(cls, run: Run, device: str) -> Subject:
        """Loads the model.

        Raises:
            ValueError: it has no causal mask, so that its losses use the tokens that they predict.
        """
        from tril.model.checkpoint import load

        lm = load(run.checkpoint, device)
        if not lm.config.causal:
            cause = "has model.causal=false, so its losses use the tokens that they predict"
            raise ValueError(f"{run.checkpoint} {cause}; name a run with the causal mask")
        lm.check_finite(run.checkpoint)
        lm.tokenizer.encode_special_tokens = True  # a text that contains <|endoftext|> is one text
        return cls(run, lm)

    @property
    def length(self) -> int:
        return self.lm.config.context_length

    @property
    def document_eot(self) -> int | None:
        """As in training."""
        return self.lm.eot_id if self.run.settings.get("data", {}).get("document_mask") else None

    def describe(self) -> dict[str, Any]:
        return {
            "checkpoint": os.path.relpath(self.run.checkpoint),
            "steps": self.run.steps,
            "parameters": self.lm.model.n_parameters(),
            "document_mask": self.document_eot is not None,
        }

    def check_samples_code(self, n: int) -> None:
        """Raises ValueError unless the model was trained on Python code."""
        source = self.run.settings.get("data", {}).get("source")
        if source != CODE:
            raise ValueError(f"samples={n} needs a model of Python code, a run with data={CODE}; leave it out")

    def parsing_samples(self, n: int) -> dict[str, Any]:
        """The share of n samples, each from the start of a text, that parse as Python."""
        from tril.model.evaluation.pairs import wilson

        texts = []
        for seed, first in enumerate(range(0, n, SAMPLES_PER_BATCH)):
            texts += self.lm.generate([""] * min(SAMPLES_PER_BATCH, n - first), seed=seed, **SAMPLING)
        parsed = sum(map(parses, texts))
        remark = "a sample without a statement does not count as parsed; one that reaches max_new_tokens is cut there"
        return {"n": n, "parsed": parsed, "share": wilson(parsed, n), "sampling": SAMPLING, "remark": remark}


def parses(code: str) -> bool:
    """Whether a text is Python code with at least one statement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd literals, such as "\\d"
        try:
            return bool(ast.parse(code).body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # null bytes; too many nested brackets
            return False


def check_stride(subjects: Sequence[Subject], stride: int | None) -> None:
    """Raises ValueError for a stride that would leave out tokens."""
    for subject in subjects:
        if stride is not None and stride > subject.length:
            limit = f"the context length of {subject.run.checkpoint}, {subject.length}"
            raise ValueError(f"stride={stride} exceeds {limit}; lower it")


def evaluate(
    subject: Subject, text: EvaluatedText, limit: int | None, stride: int | None, log: Callable[[str], None]
) -> dict[str, ScoredText]:
    """Scores the text in non-overlapping windows, and with a stride also in sliding ones."""
    from tril.model.evaluation.scored_text import ScoredText

    found, options = {}, {"limit": limit, "document_eot": subject.document_eot}
    for name, step in [("non_overlapping", None), *([] if stride is None else [("sliding", stride)])]:
        log(f"{subject.run.checkpoint}: windows of {subject.length} tokens" + (f", stride {step}" if step else ""))
        found[name] = ScoredText.of(subject.lm, text.tokens, text.n_bytes, stride=step, **options)
    return found


def check_comparable(subjects: Sequence[Subject], texts: Sequence[EvaluatedText], limit: int | None) -> None:
    """Raises ValueError if the losses of two checkpoints cannot be paired."""
    from tril.model.intervals import MIN_DOCUMENTS

    (a, b), pair = subjects, " and ".join(str(subject.run.checkpoint) for subject in subjects)
    if same_tokenizer(a.run, b.run):
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


def compare(
    subjects: Sequence[Subject], scored: Sequence[dict[str, ScoredText]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """The losses of the second checkpoint minus those of the first, paired by cluster, for each kind of windows."""
    import torch

    equal_tokens, found = same_tokenizer(subjects[0].run, subjects[1].run), {}
    for name in scored[0]:
        a, b = (each[name] for each in scored)
        # With equal tokens the targets are the same, so both have the clusters of a, whatever their context lengths.
        nats = (a if equal_tokens else b).sums(b.nll) - a.sums(a.nll)  # (G,)
        assert not equal_tokens or (a.inputs == b.inputs).all()
        differences = {"nats per token": a.clusters.mean(torch.from_numpy(nats))} if equal_tokens else {}
        differences["bits per byte"] = a.bits_per_byte(nats)
        intervals = {unit: mean.interval() for unit, mean in differences.items()}
        found[name] = {unit: {"difference": each, "other_is": verdict(each)} for unit, each in intervals.items()}
    return found


def verdict(difference: Interval) -> str:
    """Of the losses of two models, the second minus the first."""
    if difference.low is None or difference.high is None:
        return "no interval"
    if difference.low <= 0 <= difference.high:
        return "not distinguishable"
    return "higher" if difference.mean > 0 else "lower"
