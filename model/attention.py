"""Multi-head causal attention (Vaswani et al. 2017), the core of Tril.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C model width.

`attention` decides which keys each query may see, then calls one backend. `explicit` is the equation, step by step; the
other backends compute the same result.
"""

import math
import sys
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model.attention_cpu import attention_bf16
from tril.model.attention_flex import flex
from tril.model.kv_cache import LayerCache
from tril.model.masks import as_boolean, causal_mask, check_mask, check_window, open_fully_masked_rows, visible_keys
from tril.model.norm import RMSNorm
from tril.model.rope import rotate


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
    backend: str = "fused",
) -> Tensor:
    """Scaled dot-product attention, softmax(q k^T / sqrt(D)) v (Vaswani et al. 2017, equation 1).

    T may differ from S: the last query is at the position of the last key. A query that may attend to no key returns
    zeros and passes no gradient.

    Args:
        q: (B, H, T, D).
        k, v: (B, G, S, D), where H is a multiple of G (grouped queries, Ainslie et al. 2023).
        mask: boolean, True = may attend, or 0/1 integers, 0 = masked; broadcastable to (B, H, T, S); in addition to
            `causal` and `window`. `tril.model.masks` creates masks for padding, packed documents and prefixes.
        causal: mask the keys after the query's position.
        window: with `causal`: each query attends to its own position and the `window - 1` before it.
        dropout_p: probability of dropping a weight; applied whenever it is above 0, so pass 0 in evaluation.
        backend: "explicit" (the equation), "stacked" (one head after another), "fused" (torch SDPA) or "flex"
            (FlexAttention: CUDA, or CPU without gradients; no dropout).

    Returns:
        (B, H, T, D).

    Raises:
        ValueError: arguments that do not fit together, or that the backend cannot compute.
    """
    _check_arguments(q, k, v, mask, causal, window, dropout_p, backend)
    n_queries, n_keys = q.shape[2], k.shape[2]
    fully_masked = None
    if mask is not None or (causal and n_queries > n_keys):  # only these can leave a query without a visible key
        mask = visible_keys(n_queries, n_keys, mask=mask, causal=causal, window=window, device=q.device)
        assert mask is not None
        mask, fully_masked = open_fully_masked_rows(mask)
        causal, window = False, None
    elif n_queries == 1 and (window is None or window >= n_keys):
        causal, window = False, None  # one query at the last position sees every key
    out = BACKENDS[backend](q, k, v, mask, causal, window, dropout_p)  # (B, H, T, D)
    return out if fully_masked is None else out.masked_fill(fully_masked, 0.0)


def explicit(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """Scores, mask, softmax in float32, dropout, weighted sum. Without `v`: the weights, float32 (B, H, T, S).

    All backends take these arguments. Either `mask` says what is visible, and each query has a visible key, or
    `causal` and `window` do.
    """
    if k.shape[1] != q.shape[1]:
        k, v = repeat_heads(k, q), v if v is None else repeat_heads(v, q)  # (B, H, S, D)
    if causal:
        mask = causal_mask(q.shape[2], k.shape[2], window=window, device=q.device)  # (T, S)
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights if v is None else F.dropout(weights.to(v.dtype), dropout_p) @ v  # (B, H, T, D)


def stacked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """`explicit` on one head after another, as in the textbooks: slow, and obviously right."""
    group = q.shape[1] // k.shape[1]  # query heads per key/value head
    if mask is not None:
        mask = mask.expand(*q.shape[:3], k.shape[2])  # (B, H, T, S), a view
    heads = []
    for h in range(q.shape[1]):
        one, shared = slice(h, h + 1), slice(h // group, h // group + 1)
        visible = None if mask is None else mask[:, one]
        heads.append(explicit(q[:, one], k[:, shared], v[:, shared], visible, causal, window, dropout_p))
    return torch.cat(heads, dim=1)  # H of (B, 1, T, D) -> (B, H, T, D)


def fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, window: int | None, dropout_p: float
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, which picks a flash, memory-efficient or cuDNN kernel."""
    n_queries, n_keys = q.shape[2], k.shape[2]
    if q.device.type == "cpu" and n_queries == 1 and torch.compiler.is_compiling():
        return explicit(q, k, v, mask, causal, window, dropout_p)  # compiled into loops that read the KV cache once
    # torch's is_causal compares row and column numbers, so it needs queries and keys that begin at the same position.
    is_causal = causal and n_queries == n_keys and (window is None or window >= n_keys)
    if causal and not is_causal:
        mask = causal_mask(n_queries, n_keys, window=window, device=q.device)
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return attention_bf16(q, repeat_heads(k, q), repeat_heads(v, q), mask, is_causal, dropout_p)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=k.shape[1] != q.shape[1]
    )


BACKENDS = {"stacked": stacked, "explicit": explicit, "fused": fused, "flex": flex}


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) over the visible keys (Vaswani et al. 2017, equation 1).

    Args:
        q, k, mask: as in `attention`.

    Returns:
        (B, H, T, S), float32 (float64 for float64 input). Masked keys and fully masked rows are exactly 0.

    Raises:
        ValueError: a mask that `attention` refuses.
    """
    if mask is None:
        return explicit(q, k, None, None, False, None, 0.0)
    check_mask(mask, (*q.shape[:3], k.shape[2]))
    mask, fully_masked = open_fully_masked_rows(as_boolean(mask))
    return explicit(q, k, None, mask, False, None, 0.0).masked_fill(fully_masked, 0.0)


def repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D): the H/G query heads of a group share one key/value head."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, dim=1)


def _check_arguments(q, k, v, mask, causal, window, dropout_p, backend) -> None:
    same_sizes = q.dim() == k.dim() == 4 and k.shape == v.shape and (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3])
    if not same_sizes or not k.shape[1] or q.shape[1] % k.shape[1]:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{shapes} must be (B, H, T, D), (B, G, S, D), (B, G, S, D) with H a multiple of G")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} must be at least 0 and below 1")
    if window is not None:
        check_window(window, causal)
    if mask is not None:
        check_mask(mask, (*q.shape[:3], k.shape[2]))


class MultiHeadAttention(nn.Module):
    """MultiHead(X) = Concat(head_1 ... head_H) W_O (Vaswani et al. 2017, section 3.2.2).

    Each head is a slice of four ordinary `nn.Linear`: rows h*D ... (h+1)*D of `q_proj.weight` (H*D, C) are head h.

    Args:
        dim: model width C.
        n_heads, n_kv_heads: query heads H and key/value heads G, a divisor of H; None: H.
        head_dim: head size D; None: dim / n_heads.
        causal: self-attention masks the future. Cross-attention sees the whole context.
        window: as in `attention`; needs `causal`.
        qkv_bias, out_bias: biases in the q, k and v projections, and in the output projection.
        qk_norm: RMS-normalize each head's q and k, with a learned gain over D shared by the heads (Henry et al. 2020).
        attn_dropout, resid_dropout: on the weights, and on the output; in training mode only.
        backend: see `attention`.

    Raises:
        ValueError: sizes that do not fit together, an unknown backend, or a window without `causal`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: bool = False,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        backend: str = "fused",
    ):
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, size in {"dim": dim, "n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": head_dim}.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if head_dim is None and dim % n_heads:
            raise ValueError(f"n_heads={n_heads} must divide dim={dim}; change one of them or set head_dim")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads} must divide n_heads={n_heads}")
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
        if window is not None:
            check_window(window, causal)
        head_dim = dim // n_heads if head_dim is None else head_dim
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, head_dim
        self.causal, self.window, self.backend, self.attn_dropout = causal, window, backend, attn_dropout

        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=out_bias)
        self.q_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim) if qk_norm else nn.Identity()
        self.resid_dropout = nn.Dropout(resid_dropout)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
        head_gate: Tensor | None = None,
        last_only: bool = False,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends from x to itself, or to `context` (cross-attention).

        Args:
            x: (B, T, C).
            context: (B, S, C), the source of keys and values; all of it is visible unless `mask` hides a part.
            mask: as in `attention`; S counts cached positions too.
            rope: cos and sin at the positions of x, see `tril.model.rope.rotate`.
            cache: one layer of a `KVCache`; x continues what it holds. The caller advances it.
            head_gate: factor on each head's output, (H,) or (B, H): 0 removes a head.
            last_only: compute the output of the last position only; keys and values are those of all positions.
            need_weights: also return the weights before dropout.

        Returns:
            (B, T, C), with `last_only` (B, 1, C). With `need_weights` also the weights, float32 (B, H, T, S).

        Raises:
            ValueError: `context` with `rope` or `cache`, `cache` without causal=True, or a shape that does not fit.
        """
        if context is not None and (rope is not None or cache is not None):
            raise ValueError("context (cross-attention) takes neither rope nor cache, which belong to positions of x")
        if cache is not None and not self.causal:
            raise ValueError("cache needs causal=True: otherwise past outputs change with each new position")
        causal, window = (self.causal, self.window) if context is None else (False, None)
        source = x if context is None else context
        if last_only:
            x = x[:, -1:]  # (B, 1, C); T is 1 from here on
            mask = None if mask is None else torch.atleast_2d(mask)[..., -1:, :]
        q = self.q_proj(x).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(source).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)  # (B, G, S, D)
        v = self.v_proj(source).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)  # (B, G, S, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            k = rotate(k, *rope)
            q = rotate(q, *((table[..., -1:, :] for table in rope) if last_only else rope))
        if cache is not None:
            k, v = cache.update(k, v)  # (B, G, past + T, D)
            if isinstance(cache.start, Tensor):  # k and v include positions that are not written yet
                written = causal_mask(q.shape[2], k.shape[2], window=window, start=cache.start, device=x.device)
                mask, causal, window = (written if mask is None else written & as_boolean(mask)), False, None
        dropout_p = self.attn_dropout if self.training else 0.0
        out = attention(q, k, v, mask=mask, causal=causal, window=window, dropout_p=dropout_p, backend=self.backend)
        if head_gate is not None:
            shape, per_row = tuple(head_gate.shape), (x.shape[0], self.n_heads)
            if shape not in (per_row[1:], per_row):
                raise ValueError(f"head_gate of shape {shape} must be (H,) = {per_row[1:]} or (B, H) = {per_row}")
            out = out * head_gate.view(-1, self.n_heads, 1, 1).type_as(out)  # (1 or B, H, 1, 1)
        out = out.transpose(1, 2).flatten(2)  # (B, H, T, D) -> (B, T, H*D)
        out = self.resid_dropout(self.o_proj(out))  # (B, T, C)
        if not need_weights:
            return out
        visible = visible_keys(q.shape[2], k.shape[2], mask=mask, causal=causal, window=window, device=x.device)
        return out, attention_weights(q, k, visible)


class _CallableModule(types.ModuleType):
    """`from tril.model import attention` gives this module, which has the name of its function: a call goes there."""

    __call__ = staticmethod(attention)


sys.modules[__name__].__class__ = _CallableModule
