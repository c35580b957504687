"""How a GPT tells positions apart: one class for each value of `model.pos`, in POSITIONS.

B batch, T queries, S keys, H heads, D head size, C width. The causal mask counts columns, whatever the positions are.
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from tril.model.config import GPTConfig

BASE = 10_000.0  # theta of the rotary frequencies


class Positions(nn.Module):
    """No positions: the causal mask alone tells them apart. A scheme overrides what it needs."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config

    def make_tables(self) -> None:
        """Registers buffers that the config determines, so checkpoints lack them, on torch's default device."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves tables to the device of the module, and keeps them in float32 where bf16-true casts the weights."""
        tables = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, table in tables.items():
            moved = getattr(self, name)
            setattr(self, name, moved if moved.dtype == table.dtype else table.to(moved.device))
        return self

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds to the embeddings of tokens, (B, T, C) at positions (T,) or (B, T). The model casts the sum to their
        dtype."""
        return x

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin for `rotate`: positions (T,) -> (T, D/2); positions (B, T) -> (B, 1, T, D/2)."""
        return None

    def bias(self, n_queries: int, n_keys: int, *, start: Tensor | None) -> Tensor | None:
        """The bias of the scores, (H, T, S). Arguments as in `tril.model.masks.causal_mask`."""
        return None


class Learned(Positions):
    """A table, added to the embeddings of tokens (Vaswani et al. 2017, table 3 row E)."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.context_length, config.dim))

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + nn.functional.embedding(positions, self.weight)


class Rope(Positions):
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

    q and k are rotated by an angle proportional to their position, so their product depends only on the distance
    between them. Halves are paired (i with i + D/2), as in the published weights of the Llama family.
    """

    cos: Tensor
    sin: Tensor

    def make_tables(self) -> None:
        cos, sin = rope_table(self.config.context_length, self.config.head_size, base=self.config.rope_base)
        self.register_buffer("cos", cos, persistent=False)  # (context_length, D/2)
        self.register_buffer("sin", sin, persistent=False)

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos[positions], self.sin[positions]
        return (cos, sin) if positions.dim() == 1 else (cos[:, None], sin[:, None])


class Alibi(Positions):
    """Attention with linear biases (Press et al. 2022, arXiv:2108.12409): a score falls with the distance."""

    slopes: Tensor

    def make_tables(self) -> None:
        self.register_buffer("slopes", alibi_slopes(self.config.n_heads), persistent=False)  # (H,)

    def bias(self, n_queries: int, n_keys: int, *, start: Tensor | None) -> Tensor:
        return alibi_bias(self.slopes, n_queries, n_keys, start=start)


POSITIONS: dict[str, type[Positions]] = {"rope": Rope, "learned": Learned, "alibi": Alibi, "none": Positions}


def rope_table(length: int, head_dim: int, *, base: float = BASE) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/D), each (length, D/2) in float32; row p is position p."""
    device = torch.get_default_device()
    if device.type == "meta":  # arithmetic on this device imports torch's compiler
        return torch.empty(length, head_dim // 2), torch.empty(length, head_dim // 2)
    with torch.device("cpu"):  # MPS has no float64
        frequency = base ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (D/2,)
        angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency  # (length, D/2)
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x (B, H, T, D) by the angles of its positions.

    Args:
        cos, sin: (T, D/2), or (B, 1, T, D/2) for positions per row.
    """
    first, second = x.chunk(2, dim=-1)  # (B, H, T, D/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


def alibi_slopes(n_heads: int) -> Tensor:
    """The slope of each head, float32 (H,): 2^(-8/H), 2^(-16/H), ..., 2^-8 where H is a power of 2.

    Otherwise the slopes of the next smaller power of 2, P, and then every second one of 2 P, as in the authors' code
    (https://github.com/ofirpress/attention_with_linear_biases).
    """
    power = 1 << (max(n_heads, 1).bit_length() - 1)  # the largest power of 2 up to H
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (n_heads - power), 2)]
    return torch.tensor(slopes[:n_heads])


def alibi_bias(slopes: Tensor, n_queries: int, n_keys: int, *, start: Tensor | None = None) -> Tensor:
    """-slope * |position(query) - position(key)|, the `bias` of `tril.model.attention.attention`.

    Distances are counted in columns, as in the causal mask, so left padding and packed documents do not change them.

    Args:
        slopes: (H,).
        start: position of the first query, (1,) int64; None: the last query is at the position of the last key.

    Returns:
        (H, T, S), in the dtype of the slopes.
    """
    first = n_keys - n_queries if start is None else start
    query = torch.arange(n_queries, device=slopes.device)[:, None] + first  # (T, 1)
    distance = (query - torch.arange(n_keys, device=slopes.device)).abs()  # (T, S)
    return -slopes[:, None, None] * distance
