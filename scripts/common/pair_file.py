"""Files of minimal pairs: {"good": "...", "bad": "..."} in each line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from tril.scripts.common.text_file import read_utf8

if TYPE_CHECKING:
    from tril.model.generation.language_model import LanguageModel

KEYS = ("good", "bad")
NAMED_LINES = 5  # wrong lines in an error message
PAIRS_PER_BATCH = 32
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
    pairs, wrong = [], []
    for number, line in enumerate(read_utf8("pairs", file).split("\n"), 1):
        if line.strip():
            try:
                pairs.append(_pair(number, line))
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
    _refuse(file, wrong)
    if not pairs:
        raise ValueError(f"pairs={file} holds no pair; each line must be {EXAMPLE}")
    return pairs


def _pair(number: int, line: str) -> Pair:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    if not isinstance(content, dict):
        raise ValueError("not an object")
    for key in KEYS:
        if not isinstance(content.get(key), str) or not content[key]:
            raise ValueError(f"{key} must be a text of at least one character")
        try:
            content[key].encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{key} holds half of a surrogate pair") from error
    if content["good"] == content["bad"]:
        raise ValueError("good and bad are equal")
    return Pair(number, content["good"], content["bad"])


def _refuse(file: str, wrong: list[str]) -> None:
    """Raises ValueError if lines are wrong."""
    if wrong:
        more = f" and {len(wrong) - NAMED_LINES} more" if len(wrong) > NAMED_LINES else ""
        raise ValueError(f"pairs={file}: {'; '.join(wrong[:NAMED_LINES])}{more}; each line must be {EXAMPLE}")


def score_pairs(lm: LanguageModel, pairs: list[Pair], file: str) -> dict[str, Any]:
    """The accuracy, see `tril.model.evaluation.minimal_pairs`, with the losses of each pair in nats.

    Raises:
        ValueError: texts exceed the context or hold unknown characters; the message has the numbers of their lines.
    """
    import torch

    from tril.model.evaluation.minimal_pairs import compare_pairs, text_nll

    ids, wrong = [], []
    for pair in pairs:
        try:
            ids.append([_encoded(lm, text) for text in (pair.good, pair.bad)])
        except ValueError as error:
            wrong.append(f"line {pair.line}: {error}")
    _refuse(file, wrong)
    losses = []
    for first in range(0, len(ids), PAIRS_PER_BATCH):
        texts = [text for pair in ids[first : first + PAIRS_PER_BATCH] for text in pair]
        losses.append(text_nll(lm.model, texts, lm.eot_id).view(-1, 2))
    nll = torch.cat(losses)  # (P, 2)
    rows = [{"line": pair.line, "good": g, "bad": b} for pair, (g, b) in zip(pairs, nll.tolist(), strict=True)]
    return compare_pairs(nll[:, 0], nll[:, 1]) | {"nats": rows}


def _encoded(lm: LanguageModel, text: str) -> list[int]:
    ids = lm.encode(text)
    if len(ids) > lm.config.context_length:
        raise ValueError(f"a text of {len(ids)} tokens exceeds the context length, {lm.config.context_length}")
    return ids
