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
        shape = (n_layers, batch_size, n_kv_heads, capacity, head_dim)  # (L, B, G, S, D)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def layer(self, index: int) -> "LayerCache":
        return LayerCache(self, index)

    def advance(self, n_positions: int) -> None:
        self.length += n_positions


class LayerCache:
    """One layer's part of a KVCache: what `MultiHeadAttention.forward` takes as `cache`."""

    def __init__(self, cache: KVCache, index: int):
        self.cache, self.index = cache, index

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k and v (B, G, T, D) behind the past and returns past and present together, (B, G, length + T, D) each.

        Raises ValueError where they do not fit.
        """
        start, end = self.cache.length, self.cache.length + k.shape[2]
        keys, values = self.cache.keys[self.index], self.cache.values[self.index]  # (B, G, S, D)
        if k.shape[:2] != keys.shape[:2] or end > self.cache.capacity:
            raise ValueError(
                f"{k.shape[2]} positions of (B, G) = {tuple(k.shape[:2])} do not fit into a cache of (B, G) = {tuple(keys.shape[:2])} that "
                f"holds {start} of {self.cache.capacity} positions; make a larger KVCache or set its length back"
            )
        keys[:, :, start:end] = k
        values[:, :, start:end] = v
        return keys[:, :, :end], values[:, :, :end]
