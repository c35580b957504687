"""The honest loss: every target predicted from its prefix alone.

A loss computed in one pass over a window is honest only if no position sees a later one. Here each prefix goes through the model by
itself: whatever the model's attention does, the target and all that follows it are not in its input.

B windows, T targets in each, C width, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.generation.generate import inference
from tril.model.gpt import GPT, IGNORE

BATCH_SIZE = 32  # windows in one forward pass


@dataclass(frozen=True)
class Estimate:
    """A mean over windows and its standard error."""

    mean: float
    standard_error: float


def prefix_only_nll(model: GPT, ids: Tensor, targets: Tensor, *, batch_size: int = BATCH_SIZE) -> Tensor:
    """Negative log-likelihood of each target given ids[:, : t + 1] and nothing else: nats, float32 (B, T); 0 where it is IGNORE.

    ids, targets (B, T). One forward pass for each prefix length and `batch_size` windows, in evaluation mode; the model is left in the
    mode it had. For a causal model the same as `one_pass_nll`, but for rounding. Raises ValueError where T exceeds `context_length`.
    """
    with inference(list(model.modules())):
        columns = [
            torch.cat(
                [
                    _last_nll(model, *rows)
                    for rows in zip(ids[:, : t + 1].split(batch_size), targets[:, t].split(batch_size))
                ]
            )
            for t in range(ids.shape[1])
        ]
    return torch.stack(columns, dim=1)


def one_pass_nll(model: GPT, ids: Tensor, targets: Tensor, *, batch_size: int = BATCH_SIZE) -> Tensor:
    """What training and validation take for that: `model.nll` in one pass over whole windows. Arguments and result as `prefix_only_nll`."""
    with inference(list(model.modules())):
        rows = [model.nll(*pair) for pair in zip(ids.split(batch_size), targets.split(batch_size))]
    return torch.cat(rows)


def over_windows(nll: Tensor) -> Estimate:
    """Mean of (B, T) with its standard error over the B windows, B at least 2; of a difference of two such: a paired comparison."""
    means = nll.double().mean(
        1
    )  # (B,); the tokens of one window are not independent, so a window counts as one observation
    return Estimate(means.mean().item(), (means.std() / len(means) ** 0.5).item())


def _last_nll(model: GPT, ids: Tensor, target: Tensor) -> Tensor:
    """Of the one token (B,) that follows ids (B, T): nats, float32 (B,)."""
    logits = model.logits(model.hidden(ids, last_only=True)[:, 0]).float()  # (B, C) -> (B, V)
    return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
