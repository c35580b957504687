"""Attention on a CPU in bf16, where torch's flash kernel is slower than in float32.

B batch, T queries, S keys, H heads, D head size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.masks import causal_mask

QUERY_BLOCK = 256  # queries per block in `blockwise`
# Weights that `blockwise` may keep for the backward pass (64 MB); above, torch's flash kernel needs much less memory.
MAX_WEIGHTS = 1 << 25


def attention_bf16(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Tensor:
    """Softmax attention of bf16 tensors q, k, v (B, H, T or S, D).

    Args:
        mask: boolean, True = may attend, broadcastable to (B, H, T, S).
        causal: only with T = S and without `mask`.
    """
    if q.shape[:3].numel() * k.shape[2] <= MAX_WEIGHTS:
        return blockwise(q, k, v, mask, causal, dropout_p)
    with torch.autocast("cpu", enabled=False):  # autocast would cast back to bf16
        out = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), attn_mask=mask, dropout_p=dropout_p, is_causal=causal
        )
    return out.type_as(q)


def blockwise(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Tensor:
    """Matmul, softmax, matmul: oneDNN has the bf16 instructions that torch's flash kernel lacks on a CPU.

    Each block of queries is multiplied with the keys up to its end, so most of the masked half is never computed. The
    weights are kept for the backward pass.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B*H, S, D)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], n_queries, mask.shape[-1])
    blocks = []
    for start in range(0, n_queries, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, n_queries)
        n_visible = end if causal else n_keys  # queries and keys begin at the same position where `causal` is set
        visible = mask if mask is None else mask[..., start:end, :]
        if causal:
            visible = causal_mask(end - start, n_visible, device=q.device)
        bias = torch.zeros((), dtype=q.dtype)
        if visible is not None:
            bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -math.inf)
        bias = bias.expand(*q.shape[:2], end - start, n_visible).flatten(0, 1)  # (B*H, block, n_visible)
        queries = q[:, :, start:end].flatten(0, 1)  # (B*H, block, D)
        scores = torch.baddbmm(bias, queries, k[:, :n_visible].mT, alpha=1 / math.sqrt(q.shape[-1]))
        blocks.append(F.dropout(scores.softmax(-1), dropout_p) @ v[:, :n_visible])  # (B*H, block, D)
    return torch.cat(blocks, dim=1).unflatten(0, q.shape[:2])  # (B, H, T, D)
