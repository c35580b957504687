"""Minimal pairs: whether a model finds the good text of a pair more probable than the bad one."""

import json
from typing import Any

from tril.model.evaluation.scores import score_windows
from tril.model.formats import plural
from tril.model.generation.language_model import LanguageModel
from tril.model.intervals import Interval, mean_and_ends

EXAMPLE = '{"good": "...", "bad": "..."}'


def score_pairs(lm: LanguageModel, content: str, file: str) -> tuple[dict[str, Any], str]:
    """The share of pairs whose good text has the lower loss, and the losses of whole texts after end-of-text, in nats.

    Args:
        content: of the `file`, a pair in each line that is not empty.

    Returns:
        The figures, and a line that states them.

    Raises:
        ValueError: the first line that is no pair of two texts, or whose text exceeds the context or has unknown
            characters; or there is no pair.
    """
    rows, windows = [], []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            texts = _parse(line)
            for ids in map(lm.encode, texts):
                if len(ids) > (limit := lm.config.context_length):
                    raise ValueError(f"has a text of {len(ids)} tokens, more than the context length, {limit}")
                windows.append(([lm.eot_id, *ids], len(ids)))
        except ValueError as error:
            raise ValueError(f"pairs={file}: line {number} {error}") from error
        rows.append({"line": number})
    if not rows:
        raise ValueError(f"pairs={file} holds no pair; each line must be {EXAMPLE}")
    nats = iter(scores.nll.sum(dtype=float).item() for scores in score_windows(lm.model, windows))
    rows = [row | {"good": next(nats), "bad": next(nats)} for row in rows]
    right, ties = (sum(compare(row["good"], row["bad"]) for row in rows) for compare in (float.__lt__, float.__eq__))
    accuracy = wilson(right, len(rows))
    counts = f"the good text is more probable in {right} of {plural(len(rows), 'pair')}; {plural(ties, 'tie')}"
    report = {"pairs": len(rows), "right": right, "ties": ties, "accuracy": accuracy, "nats": rows}
    return report, f"accuracy {mean_and_ends(accuracy)} (95 %, Wilson): {counts}"


def _parse(line: str) -> tuple[str, str]:
    try:
        values = json.loads(line)
        good, bad = values["good"], values["bad"]
    except (ValueError, KeyError, TypeError, RecursionError):
        good = bad = None
    if not (isinstance(good, str) and isinstance(bad, str) and good and bad) or good == bad:
        raise ValueError(f"must be {EXAMPLE}, two different texts")
    return good, bad


def wilson(successes: int, n: int) -> Interval:
    """A share with the interval of Wilson (1927), 95 %."""
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return Interval(successes / n, float(found.low), float(found.high), n)
