"""Attention through FlexAttention, which skips the blocks of scores that the mask hides.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value.
"""

import functools

import torch
from torch import Tensor

from tril.model.attention_fused import fused
from tril.model.compilation import raise_recompile_limit
from tril.model.masks import Masking, visible_from_positions

MIN_HEAD_DIM = 16  # on CUDA, of D and D_v: a Triton matmul has no smaller side


def flex(q: Tensor, k: Tensor, v: Tensor, masking: Masking, dropout_p: float) -> tuple[Tensor, None]:
    """FlexAttention, on CUDA, or on a CPU without gradients. The arguments are those of
    `tril.model.attention.explicit`; the weights are not returned.

    Raises:
        ValueError: dropout, a head size below MIN_HEAD_DIM on CUDA, or gradients on another device than CUDA.
    """
    if dropout_p > 0:
        raise ValueError(
            f"backend='flex' has no attention dropout (got {dropout_p}); use backend='fused' or attn_dropout=0"
        )
    if q.device.type == "cuda" and q.shape[-1] < MIN_HEAD_DIM:
        limit = f"a head size of at least {MIN_HEAD_DIM} on CUDA"
        raise ValueError(f"backend='flex' needs {limit}, not {q.shape[-1]}; use backend='fused'")
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, masking.bias))
    if q.device.type != "cuda" and (needs_grad or q.device.type != "cpu"):
        raise ValueError(
            f"backend='flex' cannot train on {q.device.type} (its backward pass needs CUDA); use backend='fused'"
        )
    if 0 in (q.shape[2], k.shape[2]) or (q.device.type == "cuda" and v.shape[-1] < MIN_HEAD_DIM):
        return fused(q, k, v, masking, dropout_p)  # FlexAttention has no kernel for these sizes
    from torch.nn.attention.flex_attention import flex_attention

    run = flex_attention
    if q.device.type == "cpu":  # torch refuses tensors with requires_grad=True in no_grad mode too
        q, k, v = q.detach(), k.detach(), v.detach()
    if not torch.compiler.is_compiling():  # uncompiled on CUDA, it materializes all T x S scores
        run = compiled_flex() if q.device.type == "cuda" else eager_flex
    options = {"score_mod": _score_mod(q, k, masking.bias), "block_mask": _block_mask(q, k, masking)}
    return run(q, k, v, **options, enable_gqa=k.shape[1] != q.shape[1]), None


@functools.cache
def compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    raise_recompile_limit()
    return torch.compile(flex_attention)


def eager_flex(*args, **options) -> Tensor:
    """FlexAttention without its own call of torch.compile, which traces the mask for each new shape in up to 1 s and
    then runs the same operations.
    """
    from torch.nn.attention.flex_attention import flex_attention

    with torch.compiler.set_stance("force_eager"):
        return flex_attention(*args, **options)


def _score_mod(q: Tensor, k: Tensor, bias: Tensor | None):
    """Adds the bias to a score; None without a bias."""
    if bias is None:
        return None
    full = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return lambda score, b, h, i, j: score + full[b, h, i, j]


def _block_mask(q: Tensor, k: Tensor, masking: Masking):
    mask, _, causal, window = masking
    if mask is not None:
        full = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return _create_block_mask(lambda b, h, i, j: full[b, h, i, j], *full.shape, device=q.device)
    return causal_block_mask(q.shape[2], k.shape[2], window, q.device) if causal else None


@functools.lru_cache(maxsize=16)  # training repeats the same few shapes
def causal_block_mask(n_queries: int, n_keys: int, window: int | None, device: torch.device):
    offset = n_keys - n_queries  # the last query is at the position of the last key

    def visible(b, h, i, j):
        return visible_from_positions(i + offset, j, window)

    return _create_block_mask(visible, None, None, n_queries, n_keys, device=device)


def _create_block_mask(visible, *shape, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    with torch.inference_mode(False):  # a mask that validation creates is used again in training
        return create_block_mask(visible, *shape, device=device)
