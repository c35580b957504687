"""Attention one head after another, as in the textbooks.

B batch, T queries, S keys, H query heads, D head size, D_v size of a value.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tril.model.masks import Masking

# q, k, v, masking and dropout_p to the output and the weights, which are None where a kernel does not return them
Backend = Callable[[Tensor, Tensor, Tensor, Masking, float], tuple[Tensor, Any]]


def by_head(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, masking: Masking, dropout_p: float
) -> tuple[Tensor, None]:
    """Runs `backend` on one head at a time: slow, and obviously right. The arguments are those of the backend."""
    group = q.shape[1] // k.shape[1]  # query heads per key/value head
    mask, bias, causal, window = masking
    outputs = []
    for h in range(q.shape[1]):
        one, shared = slice(h, h + 1), slice(h // group, h // group + 1)
        mask_h, bias_h = (x if x is None else x.expand(*q.shape[:3], k.shape[2])[:, one] for x in (mask, bias))
        head = backend(q[:, one], k[:, shared], v[:, shared], Masking(mask_h, bias_h, causal, window), dropout_p)
        outputs.append(head[0])  # (B, 1, T, D_v)
    return torch.cat(outputs, dim=1), None
