"""Minimal pairs: whether a model finds the good text of a pair more probable than the bad one.

A file has {"good": "...", "bad": "..."} in each line. This module does not import torch until a model scores the texts.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tril.model.intervals import Interval

if TYPE_CHECKING:
    from tril.model.generation.language_model import LanguageModel

NAMED_LINES = 5  # wrong lines in an error message
EXAMPLE = '{"good": "...", "bad": "..."}'


class Pair(NamedTuple):
    """Two texts, and the number of their line in the file, from 1."""

    line: int
    good: str
    bad: str


def read_pairs(file: str) -> list[Pair]:
    """Reads all pairs; "~" is expanded, and empty lines are skipped.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, holds no pair, or lines are not pairs; the message has their numbers.
    """
    try:
        lines = Path(os.path.expanduser(file)).read_bytes().decode("utf-8").split("\n")
    except OSError as error:
        raise OSError(f"pairs={file} cannot be read ({error.strerror}); name a text file") from error
    except UnicodeDecodeError as error:
        remedy = "convert it first, e.g. iconv -f latin1 -t utf-8"
        raise ValueError(f"pairs={file} is not UTF-8 ({error.reason}); {remedy}") from error
    pairs, wrong = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                pairs.append(Pair(number, *_texts(line)))
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
    _refuse(file, wrong)
    if not pairs:
        raise ValueError(f"pairs={file} holds no pair; each line must be {EXAMPLE}")
    return pairs


def _texts(line: str) -> list[str]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(content, dict):
        raise ValueError("not an object")
    texts = []
    for name in ("good", "bad"):
        text = content.get(name)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be a text of at least one character")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{name} holds half of a surrogate pair")
        texts.append(text)
    if texts[0] == texts[1]:
        raise ValueError("good and bad are equal")
    return texts


def _refuse(file: str, wrong: list[str]) -> None:
    """Raises ValueError if lines are wrong."""
    if wrong:
        more = f" and {len(wrong) - NAMED_LINES} more" if len(wrong) > NAMED_LINES else ""
        raise ValueError(f"pairs={file}: {'; '.join(wrong[:NAMED_LINES])}{more}; each line must be {EXAMPLE}")


def score_pairs(lm: LanguageModel, pairs: list[Pair], file: str) -> dict[str, Any]:
    """The share of pairs whose good text has the lower loss, and the losses of whole texts after end-of-text, in nats.

    Raises:
        ValueError: texts exceed the context or hold unknown characters; the message has the numbers of their lines.
    """
    from tril.model.evaluation.scores import score_windows

    windows, wrong, limit = [], [], lm.config.context_length
    for line, *texts in pairs:
        try:
            for ids in map(lm.encode, texts):
                if len(ids) > limit:
                    raise ValueError(f"a text of {len(ids)} tokens exceeds the context length, {limit}")
                windows.append(([lm.eot_id, *ids], len(ids)))
        except ValueError as error:
            wrong.append(f"line {line}: {error}")
    _refuse(file, wrong)
    nats = {i: scores.nll.sum(dtype=float).item() for i, scores in score_windows(lm.model, windows)}
    rows = [{"line": pair.line, "good": nats[2 * i], "bad": nats[2 * i + 1]} for i, pair in enumerate(pairs)]
    right, ties = (sum(compare(row["good"], row["bad"]) for row in rows) for compare in (float.__lt__, float.__eq__))
    return {"pairs": len(rows), "right": right, "ties": ties, "accuracy": wilson(right, len(rows)), "nats": rows}


def wilson(successes: int, n: int) -> Interval:
    """A share with the interval of Wilson (1927), 95 %."""
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return Interval(successes / n, float(found.low), float(found.high), n)
