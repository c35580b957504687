"""The fused backend of attention. It takes the arguments of `explicit` and computes what it computes.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# q, k, v, mask, bias, is_causal and dropout_p to the output and the weights, which are None where a kernel has none
Backend = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, bool, float], tuple[Tensor, Any]]

QUERY_BLOCK = 256  # queries per block in `blockwise`
# Weights that `blockwise` may keep for the backward pass (64 MB); above, torch's flash kernel needs much less memory.
MAX_WEIGHTS = 1 << 25


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): the H/G query heads of a group share one key/value head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, is_causal: bool, dropout_p: float
) -> tuple[Tensor, None]:
    """`torch.nn.functional.scaled_dot_product_attention`, which picks a flash, memory-efficient or cuDNN kernel."""
    if bias is not None and mask is not None:
        if bias.dtype != q.dtype:  # without the clamp, the smallest float32 would become -inf and its row NaN
            largest = min(torch.finfo(x.dtype).max for x in (bias, q))
            bias = bias.clamp(-largest, largest).to(q.dtype)
        mask = additive(bias, mask)
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=k.shape[1] != q.shape[1]), None
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if q.shape[:3].numel() * k.shape[2] <= MAX_WEIGHTS:
        return blockwise(q, k, v, mask, is_causal, dropout_p), None
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.float()
    with torch.autocast("cpu", enabled=False):  # autocast would cast back to bf16, in which the kernel is slower
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).type_as(q), None


def additive(bias: Tensor, mask: Tensor) -> Tensor:
    """`bias`, and -inf where the boolean `mask` is False."""
    return bias.masked_fill(~mask, -math.inf)


def blockwise(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout_p: float) -> Tensor:
    """bf16 on a CPU: oneDNN's matmuls have the bf16 instructions that torch's flash kernel lacks.

    Each block of queries is multiplied with the keys up to its end, so most of the masked half is never computed. The
    weights are kept for the backward pass.

    Args:
        q, k, v: (B, H, T or S, D or D_v).
        mask: boolean, True = may attend, or floating point, added to the scores; broadcastable to (B, H, T, S).
        is_causal: query i sees the keys 0 to i; only with T = S and without `mask`.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    zeros = torch.zeros(1, 1, dtype=q.dtype)
    if mask is None:
        mask = zeros
    elif mask.dtype == torch.bool:
        mask = additive(zeros, mask)
    mask = mask.expand(*mask.shape[:-2], n_queries, mask.shape[-1])  # (..., T, 1 or S), added to the scores
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B*H, S, D) and (B*H, S, D_v)
    blocks = []
    for start in range(0, max(n_queries, 1), QUERY_BLOCK):  # one empty block without queries
        end = min(start + QUERY_BLOCK, n_queries)
        n_visible = end if is_causal else n_keys
        bias = mask[..., start:end, :]
        if is_causal:  # all keys before the block, and a triangle at their end
            bias = additive(bias, torch.ones(end - start, n_visible, dtype=torch.bool).tril(start))
        bias = bias.expand(*q.shape[:2], end - start, n_visible).flatten(0, 1)  # (B*H, block, n_visible)
        queries = q[:, :, start:end].flatten(0, 1)  # (B*H, block, D)
        scores = torch.baddbmm(bias, queries, k[:, :n_visible].mT, alpha=1 / math.sqrt(q.shape[-1]))
        blocks.append(F.dropout(scores.softmax(-1), dropout_p) @ v[:, :n_visible])  # (B*H, block, D_v)
    return torch.cat(blocks, dim=1).unflatten(0, q.shape[:2])  # (B, H, T, D_v)
