"""Offset keys: half of each key is that of the position before, so a query that matches a token finds its successor.

One layer can then continue a passage that occurred before. Without offset keys that takes two layers, of which the
first looks at the previous token (partial key offset, https://github.com/KellerJordan/modded-nanogpt/pull/169).

B batch, G key/value heads, T queries, S keys, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model.kv_cache import LayerCache
from tril.model.masks import visible_keys


class OffsetKeys:
    """Moves the slower half of the rotary pairs (i, i + D/2), whose product hardly depends on the distance.

    Args:
        head_dim: D.
    """

    def __init__(self, head_dim: int):
        self.half = head_dim // 2

    def shift(self, k: Tensor, cache: LayerCache | None = None) -> Tensor:
        """Moves the half of each key to the next position.

        Args:
            k: (B, G, T, D), rotated.
            cache: has the half of the key before the first one; without a cache that half is zero.

        Returns:
            (B, G, T, D). With a cache (B, G, T + 1, D): the last row has the moved half of the key that follows, which
            overwrites the other half.
        """
        if cache is None:
            return torch.where(self._moves(k), F.pad(k[..., :-1, :], (0, 0, 1, 0)), k)
        before = cache.key_at_start().type_as(k)  # (B, G, 1, D)
        return torch.where(self._moves(k), torch.cat((before, k), 2), torch.cat((k, before), 2))

    def separate(self, k: Tensor, n_queries: int, *, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        """Zeroes the moved half of a key that a query sees without the one before, as at the start of a document.

        The causal mask and its window do not separate keys.

        Args:
            k: (B, G, S, D), from `shift`.
            n_queries: T.
            mask, bias: as in `tril.model.attention.attention`.
        """
        options = {"mask": mask, "bias": bias, "causal": False, "window": None, "device": k.device}
        visible = visible_keys(n_queries, k.shape[2], **options)
        if visible is None:
            return k
        visible = visible.expand(*(1,) * (4 - visible.dim()), *visible.shape[:-1], k.shape[-2])  # (.., .., T or 1, S)
        is_first = (visible & ~F.pad(visible[..., :-1], (1, 0))).any(dim=(1, 2))  # (B or 1, S)
        return k.masked_fill(is_first[:, None, :, None] & self._moves(k), 0.0)

    def _moves(self, k: Tensor) -> Tensor:
        """Which columns are moved: (D,) bool."""
        return torch.arange(k.shape[-1], device=k.device) % max(1, self.half) >= -(-self.half // 2)
