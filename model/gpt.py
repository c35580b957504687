"""A GPT: token embedding, blocks of attention and FFN on a residual stream, final norm, LM head.

B batch, T queries, S keys, H heads, D head size, C width, V vocabulary, L layers.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tril.model.block import Block, block_norm, call_block
from tril.model.config import GPTConfig
from tril.model.initialization import init_weights, rng_state
from tril.model.kv_cache import KVCache
from tril.model.layers import MLP
from tril.model.positions import POSITIONS

__all__ = ["GPT", "MLP", "Block", "GPTConfig", "IGNORE", "call_block"]

IGNORE = -100  # a target that is left out of the loss, torch's default in cross_entropy


class GPT(nn.Module):
    """Decoder-only transformer language model.

    `hidden` and `logits` are the two halves of `forward`; `nll` is the loss per token.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("model.vocab_size=null is known only with a tokenizer; set it")
        self.config = config
        self.init_seed = rng_state()  # before the modules, whose shapes decide what they draw
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.pos_embed = POSITIONS[config.pos](config)
        self.embd_dropout = nn.Dropout(config.embd_dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = block_norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie_head()
        self.make_tables()
        init_weights(self, config, self.init_seed)

    def tie_head(self) -> None:
        """Makes the weight of the head that of the embedding, where the config says so."""
        if self.config.tie_embeddings:
            self.head.weight = self.embed.weight

    def make_tables(self) -> None:
        """Registers what follows from the config, and is not in checkpoints, on torch's default device."""
        self.pos_embed.make_tables()

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
            self._check_length(n_keys)
        else:  # a compiled step must not read the length, which changes
            start, n_keys = 0, cache.capacity
        if positions is None:
            positions = torch.arange(start, n_keys, device=ids.device)  # (T,)
        if head_gate is not None:
            self._check_gate(head_gate)
        x = self.embd_dropout(self.pos_embed.embed(self.embed(ids), positions))  # (B, T, C)
        rope = self.pos_embed.rotation(positions)
        bias = self.pos_embed.bias(ids.shape[1], n_keys, start=cache_position)  # (H, T, S)
        if self.config.checkpoint_activations and torch.is_grad_enabled():  # the backward pass computes blocks again
            run_block = functools.partial(checkpoint, run_block, use_reentrant=False)
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
        tables = {*self.embed.parameters(), *self.pos_embed.parameters(), *self.head.parameters()}
        return total - sum(p.numel() for p in tables)

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


def scored_keys(length: int, *, causal: bool, window: int | None) -> float:
    """Keys per query of a sequence of `length` tokens, on average over its positions.

    With `causal` position t sees t + 1 keys, at most `window`; the mean without a window is (length + 1) / 2. Without
    `causal` it is `length`, or the window where that is shorter.
    """
    window = length if window is None else min(window, length)
    if not causal:
        return window
    # The first `window` positions see 1, 2, ..., window keys.
    return (window * (window + 1) / 2 + (length - window) * window) / length
