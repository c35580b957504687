"""A GPT: token embedding, blocks of attention and FFN on a residual stream, final norm, LM head.

B batch, T queries, S keys, H heads, D head size, C width, V vocabulary, L layers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tril.model.alibi import alibi_bias, alibi_slopes
from tril.model.attention import MultiHeadAttention
from tril.model.config import GPTConfig
from tril.model.flops import scored_keys
from tril.model.initialization import init_weights, rng_state
from tril.model.kv_cache import KVCache
from tril.model.masks import last_row
from tril.model.mlp import MLP
from tril.model.norm import make_norm
from tril.model.rope import rope_table

__all__ = ["GPT", "MLP", "Block", "GPTConfig", "IGNORE"]

IGNORE = -100  # a target that is left out of the loss, torch's default in cross_entropy


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + FFN(norm(x)). A part that the config leaves out is None.

    Args:
        config: see `GPTConfig`.
        cross: attend to a context between the two, x + attention(norm(x), context): the decoder block of an
            encoder-decoder model (Vaswani et al. 2017, section 3.1). `GPT` has none.
    """

    def __init__(self, config: GPTConfig, *, cross: bool = False):
        super().__init__()
        has_attn, has_mlp = config.n_heads > 0, config.mlp != "none"
        if cross and not has_attn:
            raise ValueError("cross=True needs heads, and the config has none (n_heads=0); set n_heads")
        mlp = {"kind": config.mlp, "bias": config.bias, "dropout": config.resid_dropout}
        self.norm1 = block_norm(config) if has_attn else None
        self.attn = make_attention(config) if has_attn else None
        self.norm_cross = block_norm(config) if cross else None
        self.cross_attn = make_attention(config) if cross else None
        self.norm2 = block_norm(config) if has_mlp else None
        self.mlp = MLP(config.dim, config.mlp_size, **mlp) if has_mlp else None

    def forward(
        self,
        x: Tensor,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        last_only: bool = False,
        **options,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C), with `last_only` (B, 1, C).

        Args:
            context: (B, S, C), for a block with cross=True; used without normalization.
            context_mask: which part of the context is visible, broadcastable to (B, H, T, S); None: all of it.
            last_only, **options: those of `MultiHeadAttention.forward`, for self-attention; not `need_weights`.

        Raises:
            ValueError: a context without cross=True, none with it, or a context_mask without a context.
        """
        if (context is None) != (self.cross_attn is None) or (context is None and context_mask is not None):
            raise ValueError("context and Block(config, cross=True) need each other, and context_mask needs both")
        out = x[:, -1:] if last_only else x
        if self.attn is not None and self.norm1 is not None:
            out = out + self.attn(self.norm1(x), last_only=last_only, **options)
        if self.cross_attn is not None and self.norm_cross is not None:
            context_mask = last_row(context_mask) if last_only else context_mask
            out = out + self.cross_attn(self.norm_cross(out), context, mask=context_mask)
        if self.mlp is not None and self.norm2 is not None:
            out = out + self.mlp(self.norm2(out))
        return out


def call_block(block: Block, x: Tensor, **options) -> Tensor:
    """Runs the block. One compiled version of this function serves every block (regional compilation,
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html)."""
    return block(x, **options)


class GPT(nn.Module):
    """Decoder-only transformer language model.

    `hidden` and `logits` are the two halves of `forward`; `nll` is the loss per token.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    alibi_slopes: Tensor

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        state = rng_state()  # before the modules, whose shapes decide what they draw
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embed = nn.Embedding(config.context_length, config.dim) if config.pos == "learned" else None
        self.embd_dropout = nn.Dropout(config.embd_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = block_norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        if config.pos == "rope":
            cos, sin = rope_table(config.context_length, config.head_size, base=config.rope_base)
            self.register_buffer("rope_cos", cos, persistent=False)  # (context_length, D/2); follows from the config
            self.register_buffer("rope_sin", sin, persistent=False)
        if config.pos == "alibi" and config.n_heads:
            self.register_buffer("alibi_slopes", alibi_slopes(config.n_heads), persistent=False)  # (H,)
        init_weights(self, config, state)

    def forward(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        head_gate: Tensor | None = None,
    ) -> Tensor:
        """Token ids to logits.

        Args:
            ids: (B, T) int64.
            cache: continue what it holds; it is advanced by T.
            mask: boolean, True = may attend, or 0/1 integers, broadcastable to (B, H, T, S), in addition to the causal
                mask; S counts the cached positions.
            positions: absolute, (T,) or (B, T); None: from the cache's length on. Rotary and learned position
                embeddings use them. The causal mask and ALiBi do not: they count columns.
            head_gate: factor on each head's output, (L, H) or (L, B, H).

        Returns:
            (B, T, V).

        Raises:
            ValueError: the sequence exceeds `context_length`, or a shape does not fit.
        """
        return self.logits(self.hidden(ids, cache=cache, mask=mask, positions=positions, head_gate=head_gate))

    def hidden(
        self,
        ids: Tensor,
        *,
        cache: KVCache | None = None,
        cache_position: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        head_gate: Tensor | None = None,
        last_only: bool = False,
        run_block: Callable[..., Tensor] = call_block,
    ) -> Tensor:
        """The normalized last hidden state. Arguments that are not listed are those of `forward`.

        Args:
            cache_position: (1,) int64: write at this position of the cache instead of at its length, and do not advance
                it. No shape depends on it, as torch.compile needs. `positions` must be given, and one token per row.
            last_only: the state of the last position only; the last block then computes only the keys and values of the
                others.
            run_block: `call_block`, or a compiled version of it.

        Returns:
            (B, T, C), with `last_only` (B, 1, C).
        """
        if positions is None:
            start = 0 if cache is None else cache.length
            end = start + ids.shape[1]
            positions = torch.arange(start, end, device=ids.device)  # (T,)
        if cache_position is None:
            self._check_length(ids.shape[1] + (0 if cache is None else cache.length))
        if head_gate is not None:
            self._check_gate(head_gate)
        x = self.embed(ids)  # (B, T, C)
        if self.pos_embed is not None:
            x = x + self.pos_embed(positions)
        x = self.embd_dropout(x)
        rope, bias = self._rope(positions), self._alibi(ids.shape[1], cache, cache_position)
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = run_block(
                block,
                x,
                mask=mask,
                bias=bias,
                rope=rope,
                cache=None if cache is None else cache.layer(i, cache_position),
                head_gate=None if head_gate is None else head_gate[i],
                last_only=last_only and i == last,
            )  # (B, T, C)
        if cache is not None and cache_position is None:
            cache.advance(ids.shape[1])
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, V)."""
        logits = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def nll(
        self,
        ids: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        run_block: Callable[..., Tensor] = call_block,
    ) -> Tensor:
        """Negative log-likelihood of each target in nats, float32 (B, T); 0 where the target is IGNORE."""
        hidden = self.hidden(ids, mask=mask, positions=positions, run_block=run_block)  # (B, T, C)
        logits = self.logits(hidden).float()  # (B, T, V); bf16 would round the loss to 3 digits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        return loss.view_as(targets)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """An empty cache for this model, for `context_length` positions by default."""
        config, weight = self.config, self.embed.weight
        capacity = config.context_length if capacity is None else capacity
        sizes = (config.n_layers, batch_size, config.kv_heads, capacity, config.head_size)
        return KVCache(*sizes, dtype=weight.dtype, device=weight.device)

    def n_parameters(self, *, embeddings: bool = True) -> int:
        """Number of parameters; with embeddings=False without the token table, position table and head (Kaplan et al.
        2020).
        """
        total = sum(p.numel() for p in self.parameters())  # a tied head is counted once, as the embedding
        if embeddings:
            return total
        tables = {id(m.weight): m.weight.numel() for m in (self.embed, self.pos_embed, self.head) if m is not None}
        return total - sum(tables.values())

    def flops_per_token(self, length: int | None = None, *, masked: bool = False) -> int:
        """FLOPs of one training token, forward and backward, in sequences of `length` (default: context_length).

        6 N + 12 L (H D) S (PaLM, Chowdhery et al. 2022, appendix B). N are the weights that are multiplied: all but the
        look-up tables, with a tied head. S are the keys that a query sees on average; with `masked` PaLM's, for MFU.
        """
        config = self.config
        length = config.context_length if length is None else length
        keys = scored_keys(length, causal=config.causal and not masked, window=config.window)
        multiplied = self.n_parameters(embeddings=False) + self.head.weight.numel()
        return round(6 * multiplied + 12 * config.n_layers * config.n_heads * config.head_size * keys)

    def _check_length(self, length: int) -> None:
        limit = self.config.context_length
        if length > limit:
            raise ValueError(
                f"{length} positions exceed context_length={limit}; shorten the input or train a longer context"
            )

    def _check_gate(self, head_gate: Tensor) -> None:
        if self.config.n_heads == 0:
            raise ValueError("head_gate needs heads, and this model has none (n_heads=0); leave it out")
        if head_gate.shape[:1] != (len(self.blocks),):
            shape = tuple(head_gate.shape)
            raise ValueError(f"head_gate of shape {shape} must begin with the number of layers, {len(self.blocks)}")

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin: positions (T,) -> (T, D/2); positions (B, T) -> (B, 1, T, D/2)."""
        if self.config.pos != "rope":
            return None
        cos, sin = self.rope_cos[positions], self.rope_sin[positions]
        return (cos, sin) if positions.dim() == 1 else (cos[:, None], sin[:, None])

    def _alibi(self, n_queries: int, cache: KVCache | None, cache_position: Tensor | None) -> Tensor | None:
        """The bias of the scores, (H, T, S)."""
        if self.config.pos != "alibi" or not self.config.n_heads:
            return None
        if cache is None:
            return alibi_bias(self.alibi_slopes, n_queries, n_queries)
        if cache_position is None:
            return alibi_bias(self.alibi_slopes, n_queries, cache.length + n_queries)
        return alibi_bias(self.alibi_slopes, n_queries, cache.capacity, start=cache_position)


def make_attention(config: GPTConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.dim,
        config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        causal=config.causal,
        window=config.window,
        qkv_bias=config.bias if config.qkv_bias is None else config.qkv_bias,
        out_bias=config.bias,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        attn_dropout=config.attn_dropout,
        resid_dropout=config.resid_dropout,
        backend=config.backend,
    )


def block_norm(config: GPTConfig) -> nn.Module:
    return make_norm(config.norm, config.dim, eps=config.norm_eps, bias=config.bias)
