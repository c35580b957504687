"""Which key may be seen by which query. Boolean, True = may attend.

T queries, S keys. Masks come from absolute positions, never from a corner of a square: the last query stands at the last key,
so query i is at position i + S - T. That stays right with a cache (T < S), where torch's `is_causal=True` is not.
"""

import torch
from torch import Tensor


def causal_mask(
    n_queries: int, n_keys: int, *, window: int | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The causal mask, bool (T, S): key j is visible to query i if position(j) <= position(i).

    With `window=w` a query sees w keys: its own position and the w - 1 before it. Where T > S the first T - S queries stand before
    the first key and see nothing.

    Raises ValueError for a window below 1.
    """
    check_window(window)
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]  # (T, 1)
    key = torch.arange(n_keys, device=device)  # (S,)
    return visible_from_positions(query, key, window)  # (T, S)


def visible_from_positions(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Broadcast comparison of absolute positions; the one definition of causal visibility, shared with the flex backend."""
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 (a query always sees itself); leave it out to see all of the past")


def check_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless `mask` is boolean and broadcasts to `shape` = (B, H, T, S)."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"mask must be boolean (True = may attend), got {mask.dtype}; for a 0/1 mask pass mask.bool()")
    sizes = zip(reversed(mask.shape), reversed(shape))  # broadcasting compares from the last dimension
    if mask.dim() > 4 or any(have not in (1, want) for have, want in sizes):
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not broadcast to (B, H, T, S) = {shape}")
