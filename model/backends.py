"""Four ways to compute the same attention.

B batch, T queries, S keys, H query heads, G key/value heads (H is a multiple of G), D head size.

Every backend takes q (B, H, T, D), k and v (B, G, S, D) and what is visible in one of two forms, never both: `mask`, boolean and
broadcastable to (B, H, T, S), or `causal` and `window` alone. `model.attention.attention` prepares the arguments; no row is without a
visible key when it arrives here.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.masks import causal_mask, visible_from_positions

QUERY_BLOCK = 256  # queries that _bf16_products takes at a time
MOST_WEIGHTS = 1 << 25  # it keeps (64 MB); beyond them torch's flash kernel saves more memory than they save time
RECOMPILE_LIMIT = 256  # of one compiled function; torch's own limit of 8 is there to find what recompiles by mistake
FLEX_SMALLEST_HEAD = 16  # on CUDA, where a product of Triton's has no smaller side


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) over the visible keys (Vaswani et al. 2017, equation 1): (B, H, T, S).

    The softmax runs in float32 (float64 for float64 input) and stays there. Hidden keys get exactly 0; so does a row that may see
    nothing. `mask` is boolean, True = may attend, and broadcasts to (B, H, T, S).
    """
    scores = q @ _per_query_head(k, q).transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, H, T, S)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if mask is None:
        return scores.softmax(-1, dtype=dtype)
    # A row of -inf would be NaN after the softmax, in the gradient too: let it see everything, then erase it.
    blind = ~mask.any(-1, keepdim=True)
    return scores.masked_fill(~(mask | blind), -math.inf).softmax(-1, dtype=dtype).masked_fill(blind, 0.0)


def stacked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """One head after another, as the textbook draws it: the slow and obvious reference."""
    mask = _dense(q, k, mask, causal, window)
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])  # (B, H, T, S), a view
    group = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        one, its = slice(h, h + 1), slice(h // group, h // group + 1)
        visible = None if mask is None else mask[:, one]
        heads.append(explicit(q[:, one], k[:, its], v[:, its], visible, False, None, dropout_p))  # (B, 1, T, D)
    return torch.cat(heads, dim=1)  # (B, H, T, D)


def explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """Matmul, mask, softmax in float32, dropout on the weights, matmul."""
    weights = attention_weights(q, k, _dense(q, k, mask, causal, window)).to(v.dtype)  # (B, H, T, S)
    return F.dropout(weights, dropout_p) @ _per_query_head(v, q)  # (B, H, T, D)


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """torch's scaled_dot_product_attention, which picks a flash, memory-efficient or cuDNN kernel."""
    if q.device.type == "cpu" and q.shape[2] == 1 and torch.compiler.is_compiling():
        return explicit(
            q, k, v, mask, causal, window, dropout_p
        )  # of one query the compiler makes a few loops, which call no kernel
    # is_causal compares row and column numbers, so it is right only where queries and keys begin at the same position.
    square = causal and q.shape[-2] == k.shape[-2] and (window is None or window >= k.shape[-2])
    if not square:
        mask = _dense(q, k, mask, causal, window)
    options = {"attn_mask": mask, "is_causal": square, "dropout_p": dropout_p, "enable_gqa": k.shape[1] != q.shape[1]}
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        if q.shape[:3].numel() * k.shape[2] <= MOST_WEIGHTS:
            return _bf16_products(q, k, v, mask, square, dropout_p)
        with torch.autocast(
            "cpu", enabled=False
        ):  # which would cast back; torch's kernel is slower in bf16 than in float32
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).type_as(q)
    return F.scaled_dot_product_attention(q, k, v, **options)


def _bf16_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, dropout_p: float) -> Tensor:
    """The fused backend on a CPU with bf16: products through oneDNN, which has the bf16 instructions that torch's flash kernel lacks there.

    Queries go in blocks, each with the keys up to its end, so that most of the hidden half is never computed. The weights are kept for
    the backward pass.
    """
    n_queries, n_keys = q.shape[2], k.shape[2]
    k, v = _per_query_head(k, q).flatten(0, 1), _per_query_head(v, q).flatten(0, 1)  # (B*H, S, D)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], n_queries, mask.shape[-1])
    blocks = []
    for start in range(0, n_queries, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, n_queries)
        seen = end if causal else n_keys  # `causal` comes only where queries and keys begin at the same position
        visible = (
            causal_mask(end - start, seen, device=q.device)
            if causal
            else None
            if mask is None
            else mask[..., start:end, :]
        )
        bias = (
            torch.zeros((), dtype=q.dtype)
            if visible is None
            else torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, -math.inf)
        )
        bias = bias.expand(*q.shape[:2], end - start, seen).flatten(0, 1)  # (B*H, block, seen)
        scores = torch.baddbmm(bias, q[:, :, start:end].flatten(0, 1), k[:, :seen].mT, alpha=1 / math.sqrt(q.shape[-1]))
        blocks.append(F.dropout(scores.softmax(-1), dropout_p) @ v[:, :seen])  # (B*H, block, D)
    return torch.cat(blocks, dim=1).unflatten(0, q.shape[:2])


def flex(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """FlexAttention: skips the blocks that the mask hides. CUDA; on a CPU without gradients only (torch has no backward there)."""
    if dropout_p > 0:
        raise ValueError(
            f"backend='flex' has no attention dropout (got {dropout_p}); use backend='fused' or attn_dropout=0"
        )
    if q.device.type == "cuda" and q.shape[-1] < FLEX_SMALLEST_HEAD:
        size = f"a head size of at least {FLEX_SMALLEST_HEAD} on CUDA, not {q.shape[-1]}"
        raise ValueError(f"backend='flex' needs {size}; use backend='fused'")
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    if q.device.type != "cuda" and (needs_grad or q.device.type != "cpu"):
        raise ValueError(
            f"backend='flex' cannot train on {q.device.type} (FlexAttention's backward needs CUDA); use backend='fused'"
        )
    from torch.nn.attention.flex_attention import flex_attention

    run = flex_attention
    if q.device.type == "cuda" and not torch.compiler.is_compiling():
        run = _compiled_flex()  # uncompiled it would write out all T x S scores
    return run(q, k, v, block_mask=_block_mask(q, k, mask, causal, window), enable_gqa=k.shape[1] != q.shape[1])


BACKENDS = {"stacked": stacked, "explicit": explicit, "fused": fused, "flex": flex}


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): query heads h * H/G ... (h + 1) * H/G - 1 share key/value head h."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _dense(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int | None) -> Tensor | None:
    """The mask as a tensor, or None where everything is visible (the lone newest query sees the whole cache)."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    if not causal or (n_queries == 1 and (window is None or window >= n_keys)):
        return mask
    return causal_mask(n_queries, n_keys, window=window, device=q.device)


def _block_mask(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, window: int | None):
    if mask is not None:
        full = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return _create_block_mask(lambda b, h, i, j: full[b, h, i, j], *full.shape, device=q.device)
    if causal:
        return _causal_block_mask(q.shape[2], k.shape[2], window, q.device)
    return None


@functools.lru_cache(maxsize=16)  # the same few shapes come back at every step
def _causal_block_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device):
    offset = n_keys - n_queries
    return _create_block_mask(
        lambda b, h, i, j: visible_from_positions(i + offset, j, window), None, None, n_queries, n_keys, device=device
    )


def _create_block_mask(visible, *shape, device):
    from torch.nn.attention.flex_attention import create_block_mask

    with torch.inference_mode(False):  # a mask first made in validation is used again in training
        return create_block_mask(visible, *shape, device=device)


def raise_recompile_limit() -> None:
    """For a process that goes through several models and shapes, each of which is a form of its own: beyond its limit torch silently runs
    what is not compiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    raise_recompile_limit()
    return torch.compile(flex_attention)
