"""Keys and values of the past, so that decoding computes only the new positions.

L layers, B batch, G key/value heads, S capacity in positions, D head size.
"""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of all layers, with one position counter for all of them.

    Attention writes at `length` and does not move it: whoever runs the layers calls `advance` once after the last (`GPT.forward` does).
    `length` may be set back to forget the newest positions. For inference: a second write breaks the gradient of the first.
    """

    def __init__(
        self,
        n_layers: int,
        batch_size: int,
        n_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        shape = (batch_size, n_kv_heads, capacity, head_dim)  # (B, G, S, D)
        # One tensor for each layer: a compiler would take writes to parts of one for writes to the whole.
        self.keys, self.values = (
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)] for _ in range(2)
        )
        self.capacity, self.length = capacity, 0

    def layer(self, index: int) -> "LayerCache":
        return LayerCache(self, self.keys[index], self.values[index])

    def advance(self, n_positions: int) -> None:
        self.length += n_positions

    def at(self, position: Tensor) -> "FixedCache":
        """The same memory for a single next token, at a position that is a tensor (1,), as a compiled step needs it."""
        return FixedCache(self, position)


class LayerCache:
    """One layer's part of a KVCache: what `MultiHeadAttention.forward` takes as `cache`."""

    fixed = False

    def __init__(self, cache: KVCache, keys: Tensor, values: Tensor):
        self.cache, self.keys, self.values = cache, keys, values  # (B, G, S, D)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k and v (B, G, T, D) behind the past and returns past and present together, (B, G, length + T, D) each.

        Raises ValueError where they do not fit.
        """
        n_new, start = k.shape[2], self.cache.length
        end = start + n_new
        if k.shape[:2] != self.keys.shape[:2] or end > self.cache.capacity:
            raise ValueError(
                f"{n_new} positions of (B, G) = {tuple(k.shape[:2])} do not fit into a cache of (B, G) = {tuple(self.keys.shape[:2])} that "
                f"holds {start} of {self.cache.capacity} positions; make a larger KVCache or set its length back"
            )
        self.keys.narrow(2, start, n_new).copy_(k)
        self.values.narrow(2, start, n_new).copy_(v)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)


class FixedCache:
    """A KVCache in which every shape and every Python number stays the same from step to step.

    Attention gets all S positions, with those behind `position` as well: the mask has to hide them, and says everything else about
    what is visible too. The position is not checked, for which a GPU would have to be waited for.
    """

    length = 0  # which numbers no position here: the caller passes positions

    def __init__(self, cache: KVCache, position: Tensor):
        self.cache, self.position = cache, position

    def layer(self, index: int) -> "FixedLayerCache":
        return FixedLayerCache(self.cache.keys[index], self.cache.values[index], self.position)

    def advance(self, n_positions: int) -> None:
        """Nothing: who makes the position moves it."""


class FixedLayerCache:
    """One layer's part of a FixedCache."""

    fixed = True

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor):
        self.keys, self.values, self.position = keys, values, position

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k and v (B, G, 1, D) at the position and returns all keys and values, (B, G, S, D) each."""
        self.keys.index_copy_(2, self.position, k)
        self.values.index_copy_(2, self.position, v)
        return self.keys, self.values
