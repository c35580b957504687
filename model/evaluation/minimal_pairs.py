"""Minimal pairs: whether a model finds the good text of a pair more probable than the bad one.

Letters: P pairs, B texts, T longest text.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tril.model.causality.prefix_loss import one_pass_nll
from tril.model.gpt import GPT, IGNORE
from tril.model.intervals import Interval


def text_nll(model: GPT, texts: Sequence[Sequence[int]], eot_id: int) -> torch.Tensor:
    """The loss of whole texts in nats, each after an end-of-text token: (B,) float64.

    Args:
        texts: ids of each text, at least one and at most `context_length`.
    """
    length = max(map(len, texts))
    ids = torch.full((len(texts), length), eot_id)
    targets = torch.full((len(texts), length), IGNORE)
    for row, text in enumerate(texts):
        ids[row, 1 : len(text)] = torch.tensor(text[:-1])  # on the right is padding, which a causal model ignores
        targets[row, : len(text)] = torch.tensor(text)
    device = model.embed.weight.device
    return one_pass_nll(model, ids.to(device), targets.to(device)).double().sum(1).cpu()


def compare_pairs(good: torch.Tensor, bad: torch.Tensor) -> dict[str, Any]:
    """The share of pairs whose good text has the lower loss, with Wilson's 95 % interval; a tie counts as wrong.

    Args:
        good, bad: (P,) losses in nats.
    """
    right, ties = int((good < bad).sum()), int((good == bad).sum())
    return {"pairs": len(good), "right": right, "ties": ties, "accuracy": wilson(right, len(good))}


def wilson(successes: int, n: int) -> Interval:
    """A share with the interval of Wilson (1927), 95 %."""
    from scipy.stats import binomtest

    found = binomtest(successes, n).proportion_ci(0.95, method="wilson")
    return Interval(successes / n, float(found.low), float(found.high), n)
