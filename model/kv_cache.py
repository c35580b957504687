"""Keys and values of past positions, so that decoding computes only the new ones.

L layers, B batch, G key/value heads, S capacity in positions, D head size, D_v size of a value.
"""

import torch
from torch import Tensor


class KVCache:
    """Preallocated keys and values of all layers, with one position counter.

    Attention writes at `length` and does not change it: the code that runs the layers calls `advance` once after the
    last one (`GPT.forward` does). Set `length` back to forget the last positions. For inference only: a second write
    breaks the gradient of the first.

    Args:
        capacity: S, the largest number of positions.
        head_dim, v_head_dim: sizes D of a key and D_v of a value; None: D.
    """

    def __init__(
        self,
        n_layers: int,
        batch_size: int,
        n_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        def tensors(length: int, size: int) -> list[Tensor]:
            # One tensor per layer: torch.compile treats a write to a slice of one large tensor as a write to all of it.
            shape = (batch_size, n_kv_heads, length, size)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layers)]

        self.keys = tensors(capacity + 1, head_dim)  # (B, G, S + 1, D); `OffsetKeys` also writes the next position
        self.values = tensors(capacity, head_dim if v_head_dim is None else v_head_dim)  # (B, G, S, D_v)
        self.columns = torch.arange(capacity + 1, device=device)  # made once: a step would make it in every layer
        self.capacity, self.length = capacity, 0

    def layer(self, index: int, position: Tensor | None = None) -> "LayerCache":
        """The cache of one layer, which writes at `position` (1,) int64, or at `length` by default."""
        start = self.length if position is None else position
        return LayerCache(self.keys[index], self.values[index], self.columns, start)

    def advance(self, n_positions: int) -> None:
        self.length += n_positions


class LayerCache:
    """One layer's keys and values: what `MultiHeadAttention.forward` takes as `cache`.

    Attributes:
        columns: 0, 1, ..., S.
        start: position of the first new key. An int: `update` returns the positions up to the last new one. A tensor
            (1,): `update` returns all S positions, so that no shape depends on the position, as torch.compile needs;
            a mask hides those that are not written yet.
    """

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor, start: int | Tensor):
        self.keys, self.values = keys, values  # (B, G, S + 1, D) and (B, G, S, D_v)
        self.columns, self.start = columns, start

    def key_at_start(self) -> Tensor:
        """What is written at `start` so far, (B, G, 1, D): zeros, or what `OffsetKeys` left there for this key."""
        return self.keys.index_select(2, self._positions(1))

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k (B, G, T, D) and v (B, G, T, D_v) from `start` on.

        Args:
            k: may have T + 1 positions, see `OffsetKeys.shift`.

        Returns:
            The keys and values to attend to: those of start + T positions, or of all S where `start` is a tensor.

        Raises:
            ValueError: they do not fit. A tensor `start` is not checked, which would synchronize with the GPU.
        """
        n_new, capacity = v.shape[2], self.values.shape[2]
        end = capacity if isinstance(self.start, Tensor) else self.start + n_new
        if end > capacity:
            held = f"a cache that holds {self.start} of {capacity} positions"
            raise ValueError(f"{n_new} positions do not fit into {held}; create a larger one or set its length back")
        for store, new in ((self.keys, k), (self.values, v)):
            store.index_copy_(2, self._positions(new.shape[2]), new.type_as(store))  # under autocast it may be bf16
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _positions(self, n: int) -> Tensor:
        """`start` and the positions after it, (n,)."""
        if isinstance(self.start, Tensor):
            return self.start + self.columns[:n]
        return self.columns[self.start : self.start + n]
