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
        shape = (batch_size, n_kv_heads, capacity)  # (B, G, S)
        sizes = (head_dim, head_dim if v_head_dim is None else v_head_dim)
        # One tensor per layer: torch.compile treats a write to a slice of one large tensor as a write to all of it.
        self.keys, self.values = (
            [torch.zeros(*shape, size, dtype=dtype, device=device) for _ in range(n_layers)] for size in sizes
        )
        self.capacity, self.length = capacity, 0

    def layer(self, index: int, position: Tensor | None = None) -> "LayerCache":
        """The cache of one layer, which writes at `position` (1,) int64, or at `length` by default."""
        return LayerCache(self.keys[index], self.values[index], self.length if position is None else position)

    def advance(self, n_positions: int) -> None:
        self.length += n_positions


class LayerCache:
    """One layer's keys and values: what `MultiHeadAttention.forward` takes as `cache`.

    Attributes:
        start: position of the first new key. An int: `update` returns the positions up to the last new one. A tensor
            (1,): `update` returns all S positions, so that no shape depends on the position, as torch.compile needs;
            the caller masks the positions that are not written yet.
    """

    def __init__(self, keys: Tensor, values: Tensor, start: int | Tensor):
        self.keys, self.values, self.start = keys, values, start  # (B, G, S, D) and (B, G, S, D_v)

    def following(self) -> Tensor:
        """The key before `start`, (B, G, 1, D), in the columns that `offset_keys` takes; the others mean nothing.

        It is right after the length was set back, too: the key at `start` has these columns from the one before.
        """
        if isinstance(self.start, Tensor):
            return self.keys.index_select(2, self.start)
        return self.keys[:, :, self.start : self.start + 1]

    def update(self, k: Tensor, v: Tensor, following: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Writes k (B, G, T, D) and v (B, G, T, D_v) at `start`.

        Args:
            following: the last new key (B, G, 1, D) before `offset_keys`, kept at the position after it until the next
                key is written there.

        Returns:
            The keys and values to attend to: those of start + T positions, or of all S where `start` is a tensor.

        Raises:
            ValueError: they do not fit. A tensor `start` is not checked, which would synchronize with the GPU.
        """
        n_new, (batch_size, n_kv_heads, capacity, _) = k.shape[2], self.keys.shape
        expected = [(batch_size, n_kv_heads, n_new, store.shape[3]) for store in (self.keys, self.values)]
        if [tuple(k.shape), tuple(v.shape)] != expected:
            shapes = f"keys {tuple(k.shape)} and values {tuple(v.shape)} must be {expected[0]} and {expected[1]}"
            raise ValueError(f"{shapes}; create the KVCache for this module and this batch")
        if isinstance(self.start, Tensor):
            if following is not None:  # first, since there is no position after the last one
                self.keys.index_copy_(2, (self.start + 1).clamp(max=capacity - 1), following.type_as(self.keys))
            self.keys.index_copy_(2, self.start, k.type_as(self.keys))  # under autocast k and v may be bf16
            self.values.index_copy_(2, self.start, v.type_as(self.values))
            return self.keys, self.values
        end = self.start + n_new
        if end > capacity:
            held = f"a cache that holds {self.start} of {capacity} positions"
            raise ValueError(f"{n_new} positions do not fit into {held}; create a larger one or set its length back")
        if following is not None:
            room = min(following.shape[2], capacity - end)  # 0 after the last position, and for no new keys
            self.keys.narrow(2, end, room).copy_(following[:, :, :room])
        self.keys.narrow(2, self.start, n_new).copy_(k)
        self.values.narrow(2, self.start, n_new).copy_(v)
        return self.keys.narrow(2, 0, end), self.values.narrow(2, 0, end)
