"""Minimal pairs: whether a model finds the good text of a pair more probable than the bad one.

This module does not import torch until a model scores the texts.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from tril.model.intervals import Interval

if TYPE_CHECKING:
    from tril.model.generation.language_model import LanguageModel

EXAMPLE = '{"good": "...", "bad": "..."}'


class Pair(NamedTuple):
    """Two texts, and the number of their line in the file, from 1."""

    line: int
    good: str
    bad: str


def parse_pairs(content: str, file: str) -> list[Pair]:
    """The pairs in the `content` of a file, one in each line that is not empty.

    Raises:
        ValueError: it holds no pair, or something else; the message names the first wrong line.
    """
    pairs = []
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                values = json.loads(line)
                pair = Pair(number, values["good"], values["bad"])
                if not all(isinstance(text, str) and text for text in pair[1:]) or pair.good == pair.bad:
                    raise ValueError
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise ValueError(f"pairs={file}: line {number} must be {EXAMPLE}, two different texts") from error
            pairs.append(pair)
    if not pairs:
        raise ValueError(f"pairs={file} holds no pair; each line must be {EXAMPLE}")
    return pairs


def score_pairs(lm: LanguageModel, pairs: list[Pair], file: str) -> dict[str, Any]:
    """The share of pairs whose good text has the lower loss, and the losses of whole texts after end-of-text, in nats.

    Raises:
        ValueError: a text exceeds the context or holds unknown characters; the message names its line.
    """
    from tril.model.evaluation.scores import score_windows

    windows = []
    for line, *texts in pairs:
        try:
            for ids in map(lm.encode, texts):
                if len(ids) > (limit := lm.config.context_length):
                    raise ValueError(f"a text of {len(ids)} tokens exceeds the context length, {limit}")
                windows.append(([lm.eot_id, *ids], len(ids)))
        except ValueError as error:
            raise ValueError(f"pairs={file}: line {line}: {error}") from error
    nats = [scores.nll.sum(dtype=float).item() for scores in score_windows(lm.model, windows)]
    rows = [{"line": pair.line, "good": nats[2 * i], "bad": nats[2 * i + 1]} for i, pair in enumerate(pairs)]
    right, ties = (sum(compare(row["good"], row["bad"]) for row in rows) for compare in (float.__lt__, float.__eq__))
    return {"pairs": len(rows), "right": right, "ties": ties, "accuracy": wilson(right, len(rows)), "nats": rows}


def wilson(successes: int, n: int) -> Interval:
    """A share with the interval of Wilson (1927), 95 %."""
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return Interval(successes / n, float(found.low), float(found.high), n)
