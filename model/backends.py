"""The backends of attention beside the explicit one. All take its arguments and compute what it computes.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.compilation import raise_recompile_limit
from tril.model.masks import Masking, causal_mask, visible_from_positions

# q, k, v, masking and dropout_p to the output and the weights, which are None where a kernel does not return them
Backend = Callable[[Tensor, Tensor, Tensor, Masking, float], tuple[Tensor, Any]]

QUERY_BLOCK = 256  # queries per block in `blockwise`
# Weights that `blockwise` may keep for the backward pass (64 MB); above, torch's flash kernel needs much less memory.
MAX_WEIGHTS = 1 << 25
MIN_HEAD_DIM = 16  # of flex on CUDA, of D and D_v: a Triton matmul has no smaller side


def by_head(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, masking: Masking, dropout_p: float
) -> tuple[Tensor, None]:
    """Runs `backend` on one head at a time, as in the textbooks: slow, and obviously right."""
    group = q.shape[1] // k.shape[1]  # query heads per key/value head
    mask, bias, causal, window = masking
    outputs = []
    for h in range(q.shape[1]):
        one, shared = slice(h, h + 1), slice(h // group, h // group + 1)
        mask_h, bias_h = (x if x is None else x.expand(*q.shape[:3], k.shape[2])[:, one] for x in (mask, bias))
        head = backend(q[:, one], k[:, shared], v[:, shared], Masking(mask_h, bias_h, causal, window), dropout_p)
        outputs.append(head[0])  # (B, 1, T, D_v)
    return torch.cat(outputs, dim=1), None


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): the H/G query heads of a group share one key/value head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def fused(q: Tensor, k: Tensor, v: Tensor, masking: Masking, dropout_p: float) -> tuple[Tensor, None]:
    """`torch.nn.functional.scaled_dot_product_attention`, which picks a flash, memory-efficient or cuDNN kernel."""
    mask, bias, causal, window = masking
    n_queries, n_keys = q.shape[2], k.shape[2]
    # torch's is_causal compares row and column numbers, so it needs queries and keys that begin at the same position.
    is_causal = causal and n_queries == n_keys and (window is None or window >= n_keys)
    if causal and not is_causal:
        mask = causal_mask(n_queries, n_keys, window=window, device=q.device)
    if bias is not None:
        if bias.dtype != q.dtype:  # without the clamp, the smallest float32 would become -inf and its row NaN
            largest = min(torch.finfo(x.dtype).max for x in (bias, q))
            bias = bias.clamp(-largest, largest).to(q.dtype)
        mask = additive(bias, mask)
    options: dict[str, Any] = {"attn_mask": mask, "dropout_p": dropout_p, "is_causal": is_causal}
    if q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=k.shape[1] != q.shape[1]), None
    k, v = repeat_heads(k, q), repeat_heads(v, q)
    if q.shape[:3].numel() * n_keys <= MAX_WEIGHTS:
        return blockwise(q, k, v, mask, is_causal, dropout_p), None
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.float()
    with torch.autocast("cpu", enabled=False):  # autocast would cast back to bf16, in which the kernel is slower
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).type_as(q), None


def additive(bias: Tensor, mask: Tensor | None) -> Tensor:
    """`bias`, and -inf where the boolean `mask` is False."""
    return bias if mask is None else bias.masked_fill(~mask, -math.inf)


def blockwise(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Tensor:
    """bf16 on a CPU: oneDNN's matmuls have the bf16 instructions that torch's flash kernel lacks.

    Each block of queries is multiplied with the keys up to its end, so most of the masked half is never computed. The
    weights are kept for the backward pass.

    Args:
        q, k, v: (B, H, T or S, D or D_v).
        mask: boolean, True = may attend, or floating point, added to the scores; broadcastable to (B, H, T, S).
        causal: only with T = S and without `mask`.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    k, v = k.flatten(0, 1), v.flatten(0, 1)  # (B*H, S, D) and (B*H, S, D_v)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], n_queries, mask.shape[-1])
    blocks = []
    for start in range(0, max(n_queries, 1), QUERY_BLOCK):  # one empty block without queries
        end = min(start + QUERY_BLOCK, n_queries)
        n_visible = end if causal else n_keys  # queries and keys begin at the same position where `causal` is set
        bias = mask if mask is None else mask[..., start:end, :]
        if causal:
            bias = causal_mask(end - start, n_visible, device=q.device)
        if bias is None:
            bias = torch.zeros((), dtype=q.dtype)
        elif bias.dtype == torch.bool:
            bias = additive(torch.zeros(bias.shape, dtype=q.dtype), bias)
        bias = bias.expand(*q.shape[:2], end - start, n_visible).flatten(0, 1)  # (B*H, block, n_visible)
        queries = q[:, :, start:end].flatten(0, 1)  # (B*H, block, D)
        scores = torch.baddbmm(bias, queries, k[:, :n_visible].mT, alpha=1 / math.sqrt(q.shape[-1]))
        blocks.append(F.dropout(scores.softmax(-1), dropout_p) @ v[:, :n_visible])  # (B*H, block, D_v)
    return torch.cat(blocks, dim=1).unflatten(0, q.shape[:2])  # (B, H, T, D_v)


def flex(q: Tensor, k: Tensor, v: Tensor, masking: Masking, dropout_p: float) -> tuple[Tensor, None]:
    """FlexAttention, which skips the blocks of scores that the mask hides; on CUDA, or on a CPU without gradients.

    Sizes for which it has no kernel are those of `fused`.

    Raises:
        ValueError: dropout, or gradients on another device than CUDA.
    """
    device = q.device.type
    if dropout_p > 0:
        raise ValueError(f"backend='flex' has no attention dropout ({dropout_p}); use backend='fused'")
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, masking.bias))
    if device != "cuda" and (needs_grad or device != "cpu"):
        raise ValueError(f"backend='flex' cannot train on {device} (its backward pass needs CUDA); use backend='fused'")
    is_small = device == "cuda" and min(q.shape[-1], v.shape[-1]) < MIN_HEAD_DIM
    if is_small or 0 in (q.shape[2], k.shape[2]):
        return fused(q, k, v, masking, dropout_p)
    if device == "cpu":  # torch refuses tensors with requires_grad=True in no_grad mode too
        q, k, v = q.detach(), k.detach(), v.detach()
    shape = (*q.shape[:3], k.shape[2])  # (B, H, T, S)
    mask, bias, causal, window = masking
    added = None if bias is None else bias.expand(shape)
    options: dict[str, Any] = {
        "score_mod": None if added is None else lambda score, b, h, i, j: score + added[b, h, i, j],
        "block_mask": None,
        "enable_gqa": k.shape[1] != q.shape[1],
    }
    if mask is not None:
        full = mask.expand(shape)
        options["block_mask"] = create_block_mask(lambda b, h, i, j: full[b, h, i, j], shape, q.device)
    elif causal:
        options["block_mask"] = causal_block_mask(q.shape[2], k.shape[2], window, q.device)
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options), None
    if device == "cuda":  # uncompiled, it materializes all T x S scores
        return compiled_flex()(q, k, v, **options), None
    with torch.compiler.set_stance("force_eager"):  # its own torch.compile traces each new shape in up to 1 s
        return flex_attention(q, k, v, **options), None


@functools.cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    raise_recompile_limit()
    return torch.compile(flex_attention)


@functools.lru_cache(maxsize=16)  # training repeats the same few shapes
def causal_block_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device):
    offset = n_keys - n_queries  # the last query is at the position of the last key
    shape = None, None, n_queries, n_keys
    return create_block_mask(lambda b, h, i, j: visible_from_positions(i + offset, j, window), shape, device)


def create_block_mask(visible: Callable, shape: tuple, device: torch.device):
    from torch.nn.attention import flex_attention

    with torch.inference_mode(False):  # a mask that validation creates is used again in training
        return flex_attention.create_block_mask(visible, *shape, device=device)
