"""Multi-head causal attention (Vaswani et al. 2017), the core of Tril.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value, C model width.

`attention` decides which keys each query may see, then calls one backend. `explicit` is the equation, step by step; the
other backends compute the same result.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model.backends import Backend, fused, repeat_heads
from tril.model.kv_cache import LayerCache
from tril.model.layers import make_norm
from tril.model.masks import causal_mask, causal_shape, check_window, visible_keys
from tril.model.offset_keys import OffsetKeys
from tril.model.positions import rotate


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
    backend: str = "fused",
    need_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(q k^T / sqrt(D) + bias) v (Vaswani et al. 2017, equation 1).

    T may differ from S: the last query is at the position of the last key. A query that may attend to no key returns
    zeros and passes no gradient.

    Args:
        query: (B, H, T, D), (H, T, D) or (T, D).
        key, value: (B, G, S, D) and (B, G, S, D_v), where H is a multiple of G (grouped queries, Ainslie et al. 2023);
            without B, or without B and G, as the query.
        mask: boolean, True = may attend, or 0/1 integers, 0 = masked; broadcastable to the scores (..., T, S); in
            addition to `causal` and `window`.
        bias: floating point, added to the scaled scores; broadcastable to them. -inf masks a key. It may be learned.
        causal: mask the keys after the query's position.
        window: with `causal`: each query attends to its own position and the `window - 1` before it.
        dropout_p: probability of dropping a weight; applied whenever it is above 0, so pass 0 in evaluation.
        backend: "explicit" (the equation), "stacked" (one head after another) or "fused" (torch SDPA).
        need_weights: also return the weights. Fused kernels do not, so the explicit backend runs.

    Returns:
        (..., T, D_v). With `need_weights` also the weights, float32 (..., T, S), after dropout: weights @ value is it.

    Raises:
        ValueError: arguments that do not fit together, or that the backend cannot compute.
    """
    _check_arguments(query, key, value, mask, bias, causal, window, dropout_p, backend)
    n_missing = 4 - query.dim()
    if n_missing:
        query, key, value = (x[(None,) * n_missing] for x in (query, key, value))
    n_queries, n_keys = query.shape[2], key.shape[2]
    shape = causal_shape(n_queries, n_keys, window) if causal else "full"
    is_causal, fully_masked = shape == "triangle", None
    if mask is not None or bias is not None or shape == "other":
        mask = visible_keys(n_queries, n_keys, mask=mask, bias=bias, causal=causal, window=window, device=query.device)
        assert mask is not None
        # A row without a visible key attends to every key here, since softmax is undefined there and kernels differ in
        # what they return. Zeroing its result also stops the gradient.
        fully_masked = ~mask.any(-1, keepdim=True)  # (..., T, 1)
        mask = torch.atleast_2d(mask | fully_masked)  # torch's kernels take no mask of shape (S,)
        bias = None if bias is None else bias.masked_fill(bias == -math.inf, 0.0)  # `mask` hides these keys
        is_causal = False
    # On a CPU, a compiled decoding step runs the explicit backend: the compiler fuses it into loops that read the KV
    # cache once.
    is_compiled_step = n_queries == 1 and torch.compiler.is_compiling() and query.device.type == "cpu"
    if need_weights or (is_compiled_step and backend == "fused"):
        backend = "explicit"
    out, weights = BACKENDS[backend](query, key, value, mask, bias, is_causal, dropout_p)
    results = [out, weights] if need_weights else [out]  # (B, H, T, D_v), (B, H, T, S)
    if fully_masked is not None:
        results = [x.masked_fill(fully_masked, 0.0) for x in results]
    if n_missing:
        results = [x[(0,) * n_missing] for x in results]
    return (results[0], results[1]) if need_weights else results[0]


def explicit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, is_causal: bool, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Scores, bias, mask, softmax in float32, dropout, weighted sum. All backends take these arguments.

    Args:
        q, k, v: (B, H, T, D), (B, G, S, D) and (B, G, S, D_v).
        mask: bool, broadcastable to (B, H, T, S); each query has a visible key. None: all keys are visible.
        bias: finite, broadcastable to (B, H, T, S); only with a mask.
        is_causal: without a mask, query i sees the keys 0 to i; T = S.

    Returns:
        (B, H, T, D_v), and the weights after dropout, float32 (B, H, T, S).
    """
    k, v = repeat_heads(k, q), repeat_heads(v, q)  # (B, H, S, D)
    if is_causal:
        mask = causal_mask(q.shape[2], k.shape[2], device=q.device)  # (T, S)
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32))
    weights = F.dropout(weights, dropout_p)
    return weights.to(v.dtype) @ v, weights


def stacked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, is_causal: bool, dropout_p: float
) -> tuple[Tensor, None]:
    """`explicit` on one head at a time, as in the textbooks: slow, and obviously right."""
    group, scores = q.shape[1] // k.shape[1], (*q.shape[:3], k.shape[2])  # query heads per key/value head
    heads = []
    for h in range(q.shape[1]):
        one, shared = slice(h, h + 1), slice(h // group, h // group + 1)
        mask_h, bias_h = (x if x is None else x.expand(scores)[:, one] for x in (mask, bias))  # (B, 1, T, S)
        head, _ = explicit(q[:, one], k[:, shared], v[:, shared], mask_h, bias_h, is_causal, dropout_p)
        heads.append(head)  # (B, 1, T, D_v)
    return torch.cat(heads, dim=1), None


BACKENDS: dict[str, Backend] = {"stacked": stacked, "explicit": explicit, "fused": fused}


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weights softmax(q k^T / sqrt(D)) of `attention`, in float32 (float64 for float64 input): (..., T, S).

    Masked keys and fully masked rows are exactly 0.
    """
    no_values = k.new_empty(*k.shape[:-1], 0)
    return attention(q, k, no_values, mask=mask, need_weights=True)[1]


def _check_arguments(q, k, v, mask, bias, causal, window, dropout_p, backend) -> None:
    dims, heads = q.dim(), zip(q.shape[-3:-2], k.shape[-3:-2], strict=False)
    fits = 2 <= dims <= 4 and dims == k.dim() and q.shape[:-3] == k.shape[:-3] and q.shape[-1] == k.shape[-1]
    if not fits or k.shape[:-1] != v.shape[:-1] or any(h % g for h, g in heads):
        shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
        expected = "(B, H, T, D), (B, G, S, D), (B, G, S, D_v) with H a multiple of G"
        raise ValueError(f"{shapes} must be {expected}; or all without B, or also without H and G")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} must be at least 0 and below 1")
    check_window(window, causal=causal)
    if mask is not None and mask.is_floating_point():
        remedy = "pass mask.bool() for 0 and 1, mask == 0 for -inf and 0"
        raise ValueError(f"mask must be boolean (True = may attend) or 0/1 integers, not {mask.dtype}; {remedy}")
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"bias must be floating point, not {bias.dtype}; a boolean or 0/1 mask is given as mask")
    scores = (*q.shape[:-1], k.shape[-2])  # (B, H, T, S), (H, T, S) or (T, S)
    for name, x in (("mask", mask), ("bias", bias)):
        sizes = () if x is None else zip(reversed(x.shape), reversed(scores), strict=False)  # the last ones are aligned
        if x is not None and (x.dim() > dims or any(size not in (1, needed) for size, needed in sizes)):
            raise ValueError(f"{name} of shape {tuple(x.shape)} does not broadcast to that of the scores, {scores}")


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1 ... head_H) W_O (Vaswani et al. 2017, section 3.2.2).

    Each head is a slice of four ordinary `nn.Linear`: rows h*D ... (h+1)*D of `q_proj.weight` (H*D, C) are head h.

    Args:
        dim: width C of the query.
        n_heads, n_kv_heads: query heads H and key/value heads G, a divisor of H; None: H.
        head_dim, v_head_dim: head size D of queries and keys, and D_v of values; None: dim / n_heads, and D.
        kv_dim, out_dim: widths of the key and value inputs, and of the output; None: dim.
        causal: self-attention masks the future. Cross-attention sees the whole context.
        window, backend: as in `attention`; a window needs `causal`.
        qkv_bias, out_bias: biases in the q, k and v projections, and in the output projection.
        key_offset: half of each key is that of the position before, see `OffsetKeys`.
        out_proj: False: no output projection; the concatenated heads (H * D_v) are the output.
        qk_norm: normalization of each head's q and k, with a gain over D shared by the heads: "rmsnorm" (Henry et al.
            2020; also True), "layernorm" (Dehghani et al. 2023) or "none" (also False).
        norm_eps: of `qk_norm`; see `tril.model.layers.make_norm`.
        attn_dropout, resid_dropout: on the weights, and on the output; in training mode only.

    Raises:
        ValueError: sizes that do not fit together, an unknown backend or norm, or a window without `causal`.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        *,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        out_dim: int | None = None,
        kv_dim: int | None = None,
        causal: bool = True,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        out_proj: bool = True,
        qk_norm: str | bool = "none",
        norm_eps: float | None = None,
        key_offset: bool = False,
        attn_dropout: float = 0.0,
        resid_dropout: float = 0.0,
        backend: str = "fused",
    ):
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} must be one of {', '.join(BACKENDS)}")
        check_window(window, causal=causal)
        if not out_proj and (out_bias or out_dim is not None):
            raise ValueError("out_proj=False leaves out the projection of out_dim and out_bias; set one or the other")
        if head_dim is None and dim % n_heads:
            raise ValueError(f"n_heads={n_heads} must divide dim={dim}; change one of them or set head_dim")
        self.n_heads, self.n_kv_heads = n_heads, n_heads if n_kv_heads is None else n_kv_heads
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads={n_kv_heads} must divide n_heads={n_heads}")
        self.head_dim = dim // n_heads if head_dim is None else head_dim
        self.v_head_dim = self.head_dim if v_head_dim is None else v_head_dim
        kv_dim, out_dim = dim if kv_dim is None else kv_dim, dim if out_dim is None else out_dim
        self.causal, self.window, self.backend, self.attn_dropout = causal, window, backend, attn_dropout
        self.widths = (dim, kv_dim, kv_dim)  # of query, key and value

        self.q_proj = nn.Linear(dim, self.n_heads * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(kv_dim, self.n_kv_heads * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(kv_dim, self.n_kv_heads * self.v_head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.n_heads * self.v_head_dim, out_dim, bias=out_bias) if out_proj else nn.Identity()
        self.q_norm = make_norm(qk_norm, self.head_dim, eps=norm_eps)
        self.k_norm = make_norm(qk_norm, self.head_dim, eps=norm_eps)
        self.offset_keys = OffsetKeys(self.head_dim) if key_offset else None
        self.resid_dropout = nn.Dropout(resid_dropout)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        cache: LayerCache | None = None,
        value_bias: Tensor | None = None,
        head_gate: Tensor | None = None,
        last_only: bool = False,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attends from `query` to itself, or to another sequence (cross-attention).

        Args:
            query: (B, T, C).
            key: (B, S, kv_dim), all visible unless `mask` or `bias` hide a part. None, or the query: self-attention.
            value: (B, S, kv_dim); None: the key.
            mask, bias, need_weights: as in `attention`; S counts cached positions too.
            rope: cos and sin at the positions of the query, see `tril.model.positions.rotate`.
            cache: one layer of a `KVCache`; the query continues what it holds. The caller advances it.
            value_bias: (B, S, G * D_v), added to the projected values.
            head_gate: factor on each head's output, (H,) or (B, H): 0 removes a head.
            last_only: compute the output of the last position only; keys and values are those of all positions.

        Returns:
            (B, T, out_dim), with `last_only` T is 1. With `need_weights` also the weights (B, H, T, S).

        Raises:
            ValueError: cross-attention with `rope` or `cache`, `cache` without causal=True, or shapes that do not fit.
        """
        is_self = key is None or key is query
        if not is_self and (rope is not None or cache is not None):
            raise ValueError("cross-attention takes neither rope nor cache, which belong to positions of the query")
        if cache is not None and not self.causal:
            raise ValueError("cache needs causal=True: otherwise past outputs change with each new position")
        key = query if key is None else key
        value = key if value is None else value
        if [x.shape[2:] for x in (query, key, value)] != [(width,) for width in self.widths]:
            shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
            raise ValueError("{} must be (B, T, {}), (B, S, {}), (B, S, {})".format(shapes, *self.widths))
        causal, window = (self.causal, self.window) if is_self else (False, None)
        if last_only:  # T is 1 from here on
            query = query[:, -1:]  # (B, 1, C)
            mask, bias = (None if x is None else torch.atleast_2d(x)[..., -1:, :] for x in (mask, bias))
        q = self.q_proj(query).unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
        k = self.k_proj(key).unflatten(-1, (self.n_kv_heads, self.head_dim)).transpose(1, 2)  # (B, G, S, D)
        v = self.v_proj(value).unflatten(-1, (self.n_kv_heads, self.v_head_dim)).transpose(1, 2)  # (B, G, S, D_v)
        if value_bias is not None:
            v = v + value_bias.unflatten(-1, (self.n_kv_heads, self.v_head_dim)).transpose(1, 2).type_as(v)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            k = rotate(k, *rope)
            q = rotate(q, *((table[..., -1:, :] for table in rope) if last_only else rope))
        if self.offset_keys is not None:
            k = self.offset_keys.shift(k, cache)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, G, past + T, D or D_v)
        if self.offset_keys is not None:
            k = self.offset_keys.separate(k, q.shape[2], mask=mask, bias=bias)
        if cache is not None and isinstance(cache.start, Tensor):  # k and v have all positions, also unwritten ones
            sizes, options = (q.shape[2], k.shape[2]), {"window": window, "start": cache.start, "device": q.device}
            mask = visible_keys(*sizes, mask=mask, bias=None, causal=True, **options)
            causal, window = False, None
        options = {
            "dropout_p": self.attn_dropout * self.training,
            "backend": self.backend,
            "need_weights": need_weights,
        }
        out = attention(q, k, v, mask=mask, bias=bias, causal=causal, window=window, **options)
        out, weights = out if isinstance(out, tuple) else (out, None)  # (B, H, T, D_v), (B, H, T, S)
        if head_gate is not None:
            if head_gate.shape not in ((self.n_heads,), (len(out), self.n_heads)):
                shape, limit = tuple(head_gate.shape), f"(H,) or (B, H) for B={len(out)} and H={self.n_heads}"
                raise ValueError(f"head_gate of shape {shape} must be {limit}")
            out = out * head_gate.view(-1, self.n_heads, 1, 1).type_as(out)  # factors (1 or B, H, 1, 1)
        out = out.transpose(1, 2).flatten(2)  # (B, H, T, D_v) -> (B, T, H*D_v)
        out = self.resid_dropout(self.o_proj(out))  # (B, T, out_dim)
        return out if weights is None else (out, weights)
