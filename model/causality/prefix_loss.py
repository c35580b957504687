"""The prefix-only loss: each target is predicted from a pass over its prefix and nothing else.

The loss of one pass over a window is valid only if no position sees a later one. Here each prefix is a separate input,
so the target and the tokens after it are not in it, whatever the model's attention does.

B windows, T targets in each, C width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.generation.generate import inference
from tril.model.gpt import GPT, IGNORE

BATCH_SIZE = 32  # windows in one forward pass


def prefix_only_nll(model: GPT, ids: Tensor, targets: Tensor, *, batch_size: int = BATCH_SIZE) -> Tensor:
    """Negative log-likelihood of each target given ids[:, : t + 1] alone.

    Runs one forward pass per prefix length and `batch_size` windows, in evaluation mode, and restores the mode of the
    model. For a causal model the result equals `one_pass_nll`, up to rounding.

    Args:
        ids: (B, T).
        targets: (B, T).

    Returns:
        Nats, float32 (B, T); 0 where the target is IGNORE.

    Raises:
        ValueError: T exceeds `context_length`.
    """
    with inference(list(model.modules())):
        columns = []
        for t in range(ids.shape[1]):
            batches = zip(ids[:, : t + 1].split(batch_size), targets[:, t].split(batch_size), strict=True)
            columns.append(torch.cat([_last_nll(model, *batch) for batch in batches]))
    return torch.stack(columns, dim=1)


def one_pass_nll(model: GPT, ids: Tensor, targets: Tensor, *, batch_size: int = BATCH_SIZE) -> Tensor:
    """The loss of training: `model.nll` in one pass over whole windows. Arguments as in `prefix_only_nll`."""
    with inference(list(model.modules())):
        batches = zip(ids.split(batch_size), targets.split(batch_size), strict=True)
        parts = [model.nll(*batch) for batch in batches]
    return torch.cat(parts)  # outside of inference mode, for a normal tensor


def _last_nll(model: GPT, ids: Tensor, target: Tensor) -> Tensor:
    """Loss of the one token (B,) that follows ids (B, T): nats, float32 (B,)."""
    logits = model.logits(model.hidden(ids, last_only=True)[:, 0]).float()  # (B, C) -> (B, V)
    return F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none")
