"""The cross-entropy of an LM head on a CPU, in blocks of rows.

torch's keeps the logits, their log-softmax and two gradients at once, all (N, V). Here only the logits are kept, and
the gradient of a block of rows is used while it is in the processor's cache.

N rows, C width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # a target that is left out of the loss, torch's default in cross_entropy
BLOCK = 1 << 20  # logits of a block: 4 MB in float32
MIN_ROWS = 128  # of a block: fewer make slow matrix products


class HeadCrossEntropy(torch.autograd.Function):
    """Negative log-likelihood of each target in nats, from the hidden states and the weight of the head.

    The products are in the dtype of autocast, or in that of the hidden states; all else is in float32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """(N, C), (V, C), (N,) int64 -> (N,) float32; 0 where the target is IGNORE."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        states, rows = hidden.to(dtype), max(MIN_ROWS, BLOCK // len(weight))
        matrix, is_target = weight.to(dtype), targets != IGNORE
        ids = targets.clamp(min=0)[:, None]  # (N, 1)
        logits, sums, chosen = [], [], []  # of each block
        for state, index in zip(states.split(rows), ids.split(rows), strict=True):
            block = state @ matrix.T  # (rows, V)
            largest = block.amax(1, keepdim=True).float()
            logits.append(block)
            sums.append((block.float() - largest).exp_().sum(1, keepdim=True).log() + largest)
            chosen.append(block.gather(1, index))
        log_sums = torch.cat(sums)  # (N, 1)
        ctx.save_for_backward(states, matrix, ids, is_target, log_sums, *logits)
        ctx.rows, ctx.dtypes = rows, (hidden.dtype, weight.dtype)
        return (log_sums - torch.cat(chosen)).squeeze(1) * is_target

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """The gradient of a logit is softmax - one-hot, times the gradient of its row."""
        states, matrix, ids, is_target, log_sums, *logits = ctx.saved_tensors
        grads = (grad * is_target)[:, None]  # (N, 1)
        weight_grad, hidden_grads = torch.zeros(matrix.shape), []  # float32
        blocks = zip(logits, *(x.split(ctx.rows) for x in (states, ids, log_sums, grads)), strict=True)
        for block, state, index, log_sum, g in blocks:
            block = (block.float() - log_sum).exp_().mul_(g).scatter_add_(1, index, -g).to(matrix.dtype)
            hidden_grads.append(block @ matrix)  # (rows, C)
            weight_grad += block.T @ state  # (V, C)
        hidden_dtype, weight_dtype = ctx.dtypes
        return torch.cat(hidden_grads).to(hidden_dtype), weight_grad.to(weight_dtype), None
