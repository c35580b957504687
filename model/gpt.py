"""A GPT: token embedding, blocks of attention and FFN on a residual stream, final norm, LM head.

B batch, T queries, S keys, H heads, D head size, C width, V vocabulary, L layers.
"""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tril.model.attention import MultiHeadAttention
from tril.model.config import GPTConfig
from tril.model.initialization import SkipInit, init_weights
from tril.model.kv_cache import KVCache
from tril.model.layers import MLP, make_norm
from tril.model.loss import cross_entropy
from tril.model.positions import POSITIONS

RECOMPILE_LIMIT = 256  # of one function; torch's own 8 is meant to find functions that recompile by mistake


def block_norm(config: GPTConfig) -> nn.Module:
    return make_norm(config.norm, config.dim, eps=config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + FFN(norm(x)). A part that the config leaves out is None."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embed_factor = nn.Parameter(torch.empty(1)) if config.embed_skip else None
        size = config.value_embed_size
        self.value_factor = nn.Parameter(torch.empty(size)) if size else None
        self.norm1 = self.attn = self.norm2 = self.mlp = None
        if config.n_heads > 0:
            self.norm1 = block_norm(config)
            self.attn = MultiHeadAttention(
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
                key_offset=config.key_offset,
                attn_dropout=config.attn_dropout,
                resid_dropout=config.resid_dropout,
                backend=config.backend,
            )
        if config.mlp != "none":
            self.norm2 = block_norm(config)
            self.mlp = MLP(config.dim, config.mlp_size, kind=config.mlp, bias=config.bias, dropout=config.resid_dropout)

    def forward(
        self,
        x: Tensor,
        *,
        embedding: Tensor | None = None,
        value_embedding: Tensor | None = None,
        last_only: bool = False,
        **options,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C), with `last_only` (B, 1, C).

        Args:
            embedding: the input of the first block, (B, T, C); with `embed_skip`.
            value_embedding: (B, T, G * D); with `value_embed`.
            last_only, **options: those of `MultiHeadAttention.forward`; not `need_weights`.
        """
        if self.embed_factor is not None:
            assert embedding is not None
            x = x + self.embed_factor * embedding
        if self.value_factor is not None:
            assert value_embedding is not None
            options["value_bias"] = self.value_factor * value_embedding
        out = x[:, -1:] if last_only else x
        if self.attn is not None and self.norm1 is not None:
            out = out + self.attn(self.norm1(x), last_only=last_only, **options)
        if self.mlp is not None and self.norm2 is not None:
            out = out + self.mlp(self.norm2(out))
        return out


def call_block(block: Block, x: Tensor, **options) -> Tensor:
    """Runs the block. One compiled version of this function serves every block (regional compilation,
    https://docs.pytorch.org/tutorials/recipes/regional_compilation.html)."""
    return block(x, **options)


def raise_recompile_limit() -> None:
    """For a process with several models or shapes: beyond its limit, torch silently runs the function uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)


class GPT(nn.Module):
    """Decoder-only transformer language model.

    `hidden` and `logits` are the two halves of `forward`; `nll` is the loss per token.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size=null is known only with a tokenizer; set it")
        self.config = config
        seed = torch.get_rng_state().numpy().tobytes()  # before the modules, whose shapes decide what they draw
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embed = POSITIONS[config.pos](config)
        self.embd_dropout = nn.Dropout(config.embd_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        size = config.value_embed_size
        self.value_embed = nn.Embedding(config.vocab_size, size) if size else None
        self.norm = block_norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_head()
        self.pos_embed.make_tables()
        init_weights(self, config, seed)

    @classmethod
    def without_values(cls, config: GPTConfig) -> Self:
        """The model on the device meta: names and shapes, and no memory."""
        with torch.device("meta"), SkipInit():
            return cls(config)

    def tie_head(self) -> None:
        """Makes the weight of the head that of the embedding, where the config says so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

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
        if cache is None or cache_position is None:
            start = 0 if cache is None else cache.length
            n_keys = start + ids.shape[1]
            if n_keys > (limit := self.config.context_length):
                remedy = "shorten the input or train a longer context"
                raise ValueError(f"{n_keys} positions exceed context_length={limit}; {remedy}")
        else:  # a compiled step must not read the length, which changes
            start, n_keys = 0, cache.capacity
        if positions is None:
            positions = torch.arange(start, n_keys, device=ids.device)  # (T,)
        if head_gate is not None and (head_gate.shape[:1] != (len(self.blocks),) or self.config.n_heads == 0):
            shape, sizes = tuple(head_gate.shape), f"{len(self.blocks)} layers of {self.config.n_heads} heads"
            raise ValueError(f"head_gate of shape {shape} must be (L, H) or (L, B, H) for {sizes}")
        x = self.embed(ids)  # (B, T, C)
        x = self.embd_dropout(self.pos_embed.embed(x, positions).type_as(x))
        rope = self.pos_embed.rotation(positions)
        bias = self.pos_embed.bias(ids.shape[1], n_keys, start=cache_position)  # (H, T, S)
        if self.config.checkpoint_activations and torch.is_grad_enabled():  # the backward pass computes blocks again
            run_block = functools.partial(checkpoint, run_block, use_reentrant=False)
        embedding, value_embedding = x, None if self.value_embed is None else self.value_embed(ids)  # (B, T, G * D)
        if self.config.embed_skip:
            x = x.clone()  # torch.compile makes another graph of a block that gets one tensor twice
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = run_block(
                block,
                x,
                embedding=embedding,
                value_embedding=value_embedding,
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

    def nll(self, ids: Tensor, targets: Tensor, **options) -> Tensor:
        """Negative log-likelihood of each target in nats, float32 (B, T); 0 where the target is IGNORE.

        Args:
            **options: mask, positions, head_gate and run_block of `hidden`.
        """
        logits = self.logits(self.hidden(ids, **options))  # (B, T, V)
        return cross_entropy(logits.flatten(0, 1), targets.flatten()).view_as(targets)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """An empty cache for this model, for `context_length` positions by default."""
        config, weight = self.config, self.embed.weight
        capacity = config.context_length if capacity is None else capacity
        sizes = (config.n_layers, batch_size, config.kv_heads, capacity, config.head_size)
        return KVCache(*sizes, dtype=weight.dtype, device=weight.device)

    def n_parameters(self, *, embeddings: bool = True) -> int:
        """Number of parameters; with embeddings=False without the tables of tokens and positions, and without the head
        (Kaplan et al. 2020).
        """
        total = sum(p.numel() for p in self.parameters())  # a tied head is counted once, as the embedding
        if embeddings:
            return total
        modules = self.embed, self.value_embed, self.pos_embed, self.head
        tables = {p for module in modules if module is not None for p in module.parameters()}  # a tied head counts once
        return total - sum(p.numel() for p in tables)

    def flops_per_token(self, lengths: Mapping[int, float] | None = None, *, masked: bool = False) -> int:
        """FLOPs of one training token, forward and backward, on average over the training.

        6 N + 12 L (H D) S (PaLM, Chowdhery et al. 2022, appendix B). N are the weights that are multiplied: all but the
        look-up tables, with a tied head. S are the keys that a query sees on average; with `masked` PaLM's, for MFU.

        Args:
            lengths: of the sequences, each with the fraction of the tokens where it ends; None: `context_length`.
        """
        config, keys, start = self.config, 0.0, 0.0
        for length, end in (lengths or {config.context_length: 1.0}).items():
            seen = min(config.window or length, length)  # at most
            if config.causal and not masked:  # the first queries see 1, 2, ..., seen - 1 keys
                seen = (seen * length - seen * (seen - 1) // 2) / length
            keys, start = keys + (end - start) * seen, end
        multiplied = self.n_parameters(embeddings=False) + self.head.weight.numel()
        return round(6 * multiplied + 12 * config.n_layers * config.n_heads * config.head_size * keys)


def sizes(model: GPT, lengths: Mapping[int, float] | None = None) -> dict[str, int]:
    """Parameters and FLOPs; the lengths are those of `GPT.flops_per_token`.

    Active parameters are those multiplied for every token: all but look-up tables.
    """
    body = model.n_parameters(embeddings=False)
    return {
        "parameters": model.n_parameters(),
        "parameters_without_embeddings": body,
        "active_parameters": body + model.head.weight.numel(),
        "flops_per_token": model.flops_per_token(lengths),
    }


def check_memory(config: GPTConfig) -> None:
    """Raises ValueError if a model exceeds the memory of this machine, before anything is allocated.

    Args:
        config: a vocabulary of None, while the text is unknown, counts as one token.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    model = GPT.without_values(replace(config, vocab_size=config.vocab_size or 1))
    needed = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    if needed > available:
        names = ["context_length", "n_layers", "dim"] + ["vocab_size"] * (config.vocab_size is not None)
        size = ", ".join(f"model.{name}={getattr(config, name)}" for name in names)
        limit = f"{needed / 2**30:,.0f} GiB of memory, and this machine has {available / 2**30:,.0f}"
        raise ValueError(f"{size} need at least {limit}; make the model smaller")
