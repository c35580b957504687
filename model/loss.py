"""The loss of next-token prediction on a CPU, computed in blocks of rows that fit into the cache of a core.

M targets, V vocabulary. `F.cross_entropy` fills three (M, V) tensors in float32: the logits, the logarithms of the
probabilities, and a gradient that is zero but for one number in each row. In blocks, they need almost no memory: with
50,257 tokens, a run needs less than half (docs/log.md).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tril.data.batches import IGNORE

BLOCK = 1 << 18  # logits of a block: 1 MB in float32


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-ln of the probability of each target, float32 (M,), from logits (M, V); 0 where the target is IGNORE."""
    if logits.device.type != "cpu" or torch.compiler.is_compiling():  # the compiler fuses the passes
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="none")
    return _BlockwiseCrossEntropy.apply(logits, targets)


class _BlockwiseCrossEntropy(torch.autograd.Function):
    """Keeps the logits, and computes their probabilities again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        losses = logits.new_empty(targets.shape, dtype=torch.float32)
        for rows in _blocks(logits):
            logp = logits[rows].log_softmax(-1, dtype=torch.float32)  # (block, V); bf16 rounds the loss to 3 digits
            losses[rows] = F.nll_loss(logp, targets[rows], ignore_index=IGNORE, reduction="none")
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The gradient of a row is its probabilities, less 1 at the target, times that of its loss."""
        logits, targets = ctx.saved_tensors
        grad = grad.masked_fill(targets == IGNORE, 0.0)[:, None]  # (M, 1)
        index, result = targets.clamp(min=0)[:, None], torch.empty_like(logits)
        for rows in _blocks(logits):
            block = logits[rows].softmax(-1, dtype=torch.float32).mul_(grad[rows])  # (block, V)
            result[rows] = block.scatter_add_(1, index[rows], -grad[rows])
        return result, None


def _blocks(logits: Tensor) -> list[slice]:
    size = max(1, BLOCK // logits.shape[1])
    return [slice(start, start + size) for start in range(0, len(logits), size)]
