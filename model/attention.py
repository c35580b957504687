"""Multi-head causal attention: the heart of Tril.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C model width.

`attention` is the one place where the backends meet: what is visible is settled first, the same for all of them, and they differ in
one call.
"""

import torch
from torch import Tensor, nn

from tril.model.backends import BACKENDS
from tril.model.backends import attention_weights as weights_of
from tril.model.kv_cache import LayerCache
from tril.model.masks import as_boolean, causal_mask, check_mask, check_window
from tril.model.norm import RMSNorm
from tril.model.rope import rotate

__all__ = ["BACKENDS", "MultiHeadAttention", "attention", "attention_weights", "causal_mask"]


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

    q (B, H, T, D); k, v (B, G, S, D) with H a multiple of G (grouped queries, Ainslie et al. 2023). Returns (B, H, T, D).
    T may differ from S: the last query stands at the last key.

    mask       boolean, True = may attend, or 0/1 integers, 0 = hidden; broadcastable to (B, H, T, S); applies on top of `causal` and
               `window`. `model.masks` makes those for padding, packed documents and prefixes
    window     a query sees this many keys, its own included; needs `causal`
    dropout_p  probability of dropping a weight; applied whenever it is above 0, so pass 0 in evaluation
    backend    "stacked" (one head after another), "explicit" (matmul, mask, softmax, matmul), "fused" (torch SDPA) or
               "flex" (FlexAttention: CUDA, or CPU without gradients; no dropout)

    A query that may see nothing returns zeros and passes no gradient. Raises ValueError for anything that a backend cannot honour.
    """
    _check(q, k, v, mask, causal, window, dropout_p, backend)
    blind = None
    # Only these two can leave a query without a key. Softmax has no answer there (0/0), and kernels differ in what they return: such
    # a query sees everything for the moment and is erased below, which also stops its gradient.
    if mask is not None or (causal and q.shape[2] > k.shape[2]):
        mask = visible_keys(q.shape[2], k.shape[2], mask=mask, causal=causal, window=window, device=q.device)
        blind = ~mask.any(-1, keepdim=True)  # (..., T, 1)
        mask, causal, window = torch.atleast_2d(mask | blind), False, None  # torch's kernels take no mask of shape (S,)
    out = BACKENDS[backend](q, k, v, mask, causal, window, dropout_p)  # (B, H, T, D)
    return out if blind is None else out.masked_fill(blind, 0.0)


def visible_keys(
    n_queries: int, n_keys: int, *, mask: Tensor | None, causal: bool, window: int | None, device: torch.device
) -> Tensor | None:
    """Everything that hides keys as one boolean mask, broadcastable to (B, H, T, S); None if nothing does."""
    mask = None if mask is None else as_boolean(mask)
    if not causal:
        return mask
    positions = causal_mask(n_queries, n_keys, window=window, device=device)  # (T, S)
    return positions if mask is None else positions & mask


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(q k^T / sqrt(D)) over the visible keys (Vaswani et al. 2017, equation 1): float32 (float64 for float64) (B, H, T, S).

    q (B, H, T, D), k (B, G, S, D); `mask` as in `attention`. Hidden keys get exactly 0; so does a row that may see nothing. Raises
    ValueError for a mask that `attention` would refuse.
    """
    check_mask(mask, (*q.shape[:3], k.shape[2]))
    return weights_of(q, k, None if mask is None else as_boolean(mask))


def _check(q, k, v, mask, causal, window, dropout_p, backend) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
    if (
        not q.dim() == k.dim() == 4
        or k.shape != v.shape
        or q.shape[0] != k.shape[0]
        or q.shape[3] != k.shape[3]
        or q.shape[1] % k.shape[1]
    ):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be (B, H, T, D), (B, G, S, D), (B, G, S, D) with H a multiple of G"
        )
    if window is not None and not causal:
        raise ValueError(f"window={window} counts back from the query's own position and needs causal=True")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} must be at least 0 and below 1")
    check_window(window)
    check_mask(mask, (*q.shape[:3], k.shape[2]))


class MultiHeadAttention(nn.Module):
    """MultiHead(X) = Concat(head_1 ... head_H) W_O (Vaswani et al. 2017, section 3.2.2).

    Each head is a slice of four ordinary `nn.Linear`: rows h*D ... (h+1)*D of `q_proj.weight` (H*D, C) are head h.

    dim            model width C
    n_heads        query heads H
    n_kv_heads     key/value heads G, a divisor of H; None: H
    head_dim       head size D; None: dim / n_heads
    causal         hide the future
    window         with `causal`: see this many newest keys, one's own included; None: all of the past
    qkv_bias       biases on the q, k and v projections
    out_bias       bias on the output projection
    qk_norm        RMS-normalise each head's q and k, with a learned gain over D shared by the heads (Henry et al. 2020)
    attn_dropout   on the weights, in training mode
    resid_dropout  on the output, in training mode
    backend        see `attention`
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
        sizes = {
            "dim": dim,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": 1 if head_dim is None else head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if head_dim is None and dim % n_heads:
            raise ValueError(f"dim={dim} is not a multiple of n_heads={n_heads}; change one of them or set head_dim")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads={n_heads} is not a multiple of n_kv_heads={n_kv_heads}")
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is not one of {', '.join(BACKENDS)}")
        if window is not None and not causal:
            raise ValueError(f"window={window} needs causal=True")
        check_window(window)
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
        """x (B, T, C) -> (B, T, C), with `last_only` (B, 1, C).

        context       (B, S, C): keys and values come from here (cross-attention); None: from x
        mask          boolean, True = may attend, or 0/1 integers, broadcastable to (B, H, T, S), S counting the cached positions too
        rope          cos and sin at the positions of x, see `model.rope.rotate`
        cache         this layer's part of a `KVCache`; x continues what it holds. The caller advances it
        head_gate     factor on each head's output, (H,) or (B, H): 0 removes a head
        newest        only the last position asks; keys and values are of all
        need_weights  also return the weights before dropout, float32 (B, H, T, S)

        Raises ValueError for combinations without a meaning: `context` with `rope` or `cache` (its positions and keys are another
        sequence's), `cache` without `causal`.
        """
        if context is not None and (rope is not None or cache is not None):
            raise ValueError(
                "context (cross-attention) goes with neither rope nor cache: they belong to the positions of x"
            )
        if cache is not None and not self.causal:
            raise ValueError("cache needs causal=True: without it, earlier positions would have to see later ones")
        source = x if context is None else context
        if last_only:
            x = x[:, -1:]  # from here on T is 1
            mask = None if mask is None else torch.atleast_2d(mask)[..., -1:, :]
        q = self._split(self.q_proj(x), self.n_heads)  # (B, H, T, D)
        k = self._split(self.k_proj(source), self.n_kv_heads)  # (B, G, S, D)
        v = self._split(self.v_proj(source), self.n_kv_heads)  # (B, G, S, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            k = rotate(k, *rope)
            q = rotate(q, *([part[..., -1:, :] for part in rope] if last_only else rope))
        causal, window = self.causal, self.window
        if cache is not None:
            k, v = cache.update(k, v)  # (B, G, past + T, D)
            if cache.fixed:  # the last query does not stand at the last key: `mask` says everything
                causal, window = False, None
        out = attention(
            q,
            k,
            v,
            mask=mask,
            causal=causal,
            window=window,
            dropout_p=self.attn_dropout if self.training else 0.0,
            backend=self.backend,
        )  # (B, H, T, D)
        if head_gate is not None:
            out = out * self._per_head(head_gate, x.shape[0]).type_as(out)
        out = self.resid_dropout(
            self.o_proj(out.transpose(1, 2).flatten(2))
        )  # (B, T, H, D) -> (B, T, H*D) -> (B, T, C)
        if not need_weights:
            return out
        visible = visible_keys(q.shape[2], k.shape[2], mask=mask, causal=causal, window=window, device=x.device)
        return out, weights_of(q, k, visible)

    def _split(self, x: Tensor, n_heads: int) -> Tensor:
        """(B, T, n*D) -> (B, n, T, D)"""
        return x.unflatten(-1, (n_heads, self.head_dim)).transpose(1, 2)

    def _per_head(self, gate: Tensor, batch_size: int) -> Tensor:
        """(H,) or (B, H) -> (1 or B, H, 1, 1)"""
        if gate.shape not in ((self.n_heads,), (batch_size, self.n_heads)):
            raise ValueError(
                f"head_gate of shape {tuple(gate.shape)} must be (H,) = ({self.n_heads},) or (B, H) = {(batch_size, self.n_heads)}"
            )
        return gate.view(-1, self.n_heads, 1, 1)
