"""The model that most entries change in one part: embedding and positions, blocks of attention and MLP, norm, head.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.entry import CONTEXT_LENGTH, VOCAB_SIZE

DIM = 16  # C
N_HEADS = 4  # H

Rule = Callable[
    [Tensor, Tensor], Tensor
]  # query positions (T, 1), key positions (S,) -> may attend, (T, S) or (H, T, S)


def causal(query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def next_token(x: Tensor) -> Tensor:
    """(B, T, C) shifted left by one position, with zeros at the last one."""
    return F.pad(x[:, 1:], (0, 0, 0, 1))


def steps(x: Tensor) -> Tensor:
    """(T,) positions of (B, T, ...) or (B, T)."""
    return torch.arange(x.shape[1], device=x.device)


class Attention(nn.Module):
    """Self-attention, (B, T, C) -> (B, T, C).

    Args:
        rule: which positions may attend to which.
        weights: scores (B, H, T, S) and the mask -> weights (B, H, T, S).
        scale: of the scores; None: 1 / sqrt(D).
    """

    def __init__(
        self,
        rule: Rule = causal,
        weights: Callable[[Tensor, Tensor], Tensor] = masked_softmax,
        *,
        n_kv_heads: int = N_HEADS,
        scale: float | None = None,
    ):
        super().__init__()
        size = DIM // N_HEADS
        self.rule, self.weights, self.n_kv_heads = rule, weights, n_kv_heads
        self.scale = 1 / math.sqrt(size) if scale is None else scale
        self.q_proj: nn.Module = nn.Linear(DIM, DIM)
        self.k_proj: nn.Module = nn.Linear(DIM, n_kv_heads * size)
        self.v_proj: nn.Module = nn.Linear(DIM, n_kv_heads * size)
        self.o_proj = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.merge(self.weights(self.scores(q, k), self.visible(x)) @ v)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, (B, H, T, D) each; key/value heads are repeated."""
        q, k, v = (f(x).unflatten(-1, (-1, DIM // N_HEADS)).mT for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.movedim(-1, 1) for part in (q, k, v))  # (B, H or G, T, D) from (B, T, D, H or G)
        repeats = N_HEADS // self.n_kv_heads
        return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * self.scale

    def visible(self, x: Tensor) -> Tensor:
        return self.rule(steps(x)[:, None], steps(x))

    def merge(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, C)


class Mix(nn.Module):
    """A function of (B, T, C) without parameters; `inner` is applied before it."""

    def __init__(self, function: Callable[[Tensor], Tensor], inner: nn.Module | None = None):
        super().__init__()
        self.function, self.inner = function, nn.Identity() if inner is None else inner

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


class MLP(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class Positions(nn.Module):
    """Learned positions: (B, T, C) embeddings -> (T, C) to add."""

    def __init__(self, context_length: int = CONTEXT_LENGTH):
        super().__init__()
        self.table = nn.Parameter(torch.randn(context_length, DIM) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm1: nn.Module = nn.LayerNorm(DIM)
        self.attn: nn.Module = attn
        self.norm2: nn.Module = nn.LayerNorm(DIM)
        self.mlp: nn.Module = mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Backbone(nn.Module):
    """ids (B, T) -> logits (B, T, V).

    Args:
        attn, mlp: replace those of block `layer`.
        embed: ids (B, T) -> (B, T, C).
        positions: embeddings (B, T, C) -> what is added to them.
    """

    def __init__(
        self,
        *,
        attn: nn.Module | None = None,
        mlp: nn.Module | None = None,
        embed: nn.Module | None = None,
        positions: nn.Module | None = None,
        norm: nn.Module | None = None,
        head: nn.Module | None = None,
        layer: int = 0,
        n_layers: int = 2,
        context_length: int = CONTEXT_LENGTH,
    ):
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, DIM) if embed is None else embed
        self.positions = Positions(context_length) if positions is None else positions
        blocks = [Block(Attention(), MLP()) for _ in range(n_layers)]
        blocks[layer] = Block(attn or blocks[layer].attn, mlp or blocks[layer].mlp)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(DIM) if norm is None else norm
        self.head = nn.Linear(DIM, VOCAB_SIZE) if head is None else head

    def block(self, layer: int = 0) -> Block:
        return cast(Block, self.blocks[layer])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.positions(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def window(width: int) -> Callable[[int], Tensor]:
    """T -> (T, T) bool: the own position and the width - 1 before it."""
    return lambda length: torch.ones(length, length).tril().triu(1 - width).bool()
