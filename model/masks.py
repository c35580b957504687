"""Which key may be seen by which query. Boolean, True = may attend.

B batch, T queries, S keys, H heads. Masks come from absolute positions, never from a corner of a square: the last query stands at
the last key, so query i is at position i + S - T. That stays right with a cache (T < S), where torch's `is_causal=True` is not.
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
    return visible_from_positions(*_positions(n_queries, n_keys, device), window)  # (T, S)


def visible_from_positions(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Broadcast comparison of absolute positions; the one definition of causal visibility, shared with the flex backend."""
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def prefix_mask(
    n_queries: int, n_keys: int, prefix_length: int | Tensor, *, device: torch.device | str | None = None
) -> Tensor:
    """The mask of a prefix language model (Raffel et al. 2020, section 3.2.1): bool (T, S), or (B, 1, T, S) for lengths (B,).

    The first `prefix_length` positions see each other in full, the later ones all of the past. It takes the place of the causal mask,
    so it belongs to a model of causal=False: with causal=True the prefix would be cut back to the past.

    `prefix_length` is a whole number, or integers (B,), whose values are taken as they are (looking at them would wait for a GPU).
    Raises ValueError for a negative number and for a tensor of another kind.
    """
    prefix = torch.as_tensor(prefix_length, device=device)
    if prefix.dim() > 1 or not _holds_integers(prefix):
        kind = f"prefix_length of shape {tuple(prefix.shape)} and {prefix.dtype}"
        raise ValueError(f"{kind} must be a whole number, or integers (B,) with one for each row")
    if not isinstance(prefix_length, Tensor) and prefix_length < 0:
        raise ValueError(f"prefix_length={prefix_length} must be at least 0 (0: a causal mask)")
    if prefix.dim() == 1:
        prefix = prefix[:, None, None, None]  # (B, 1, 1, 1)
    query, key = _positions(n_queries, n_keys, prefix.device)  # (T, 1), (S,)
    # A query before the first key (T > S) is no part of the prefix.
    return visible_from_positions(query, key, None) | ((query >= 0) & (key < prefix))  # (T, S) or (B, 1, T, S)


def padding_mask(visible: Tensor) -> Tensor:
    """Hides padding: (B, S), boolean or 0/1 integers, 0 = hidden -> bool (B, 1, 1, S).

    The convention is that of `scores.masked_fill(mask == 0, -inf)` and of the `attention_mask` that Hugging Face's tokenizers return. S
    counts the cached positions too. Give left-padded rows their own `positions` as well. A row of padding alone sees nothing, and
    its attention is zeros.

    Raises ValueError for other shapes and for floats.
    """
    if visible.dim() != 2:
        raise ValueError(
            f"padding of shape {tuple(visible.shape)} must be (B, S): one 0 (hidden) or 1 for each key of each row"
        )
    _check_dtype(visible)
    return as_boolean(visible)[:, None, None]


def document_mask(documents: Tensor) -> Tensor:
    """Keeps the documents of a packed window apart: numbers (B, T) -> bool (B, 1, T, T), True where query and key have the same.

    The causal half comes from the model.
    """
    return documents[:, None, :, None] == documents[:, None, None, :]


def split_documents(ids: Tensor, eot_id: int) -> tuple[Tensor, Tensor]:
    """PreparedText token ids (B, T) -> the number of each token's document and its position in it, int64 (B, T) each.

    The end-of-text token belongs to the document that it opens, at position 0: it is predicted at the end of one text, and a new text
    begins with it, in generation as well. What stands before the first one is the rest of document 0, with positions from 0.
    """
    opens = ids == eot_id
    place = torch.arange(ids.shape[1], device=ids.device)  # (T,)
    start = torch.where(opens, place, 0).cummax(1).values  # (B, T), where the token's document begins
    return opens.cumsum(1), place - start


def check_window(window: int | None) -> None:
    if window is not None and window < 1:
        raise ValueError(
            f"window={window} must be at least 1 (a query always sees itself); leave it out to see all of the past"
        )


def check_mask(mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    """Raises ValueError unless `mask` is boolean or of integers and broadcasts to `shape` = (B, H, T, S)."""
    if mask is None:
        return
    _check_dtype(mask)
    sizes = zip(reversed(mask.shape), reversed(shape))  # broadcasting compares from the last dimension
    if mask.dim() > 4 or any(have not in (1, want) for have, want in sizes):
        raise ValueError(
            f"mask of shape {tuple(mask.shape)} does not broadcast to (B, H, T, S) = {shape}; "
            "padding of shape (B, S) goes through model.masks.padding_mask"
        )


def as_boolean(mask: Tensor) -> Tensor:
    """True = may attend; of integers, 0 is hidden."""
    return mask if mask.dtype == torch.bool else mask != 0


def _check_dtype(mask: Tensor) -> None:
    if mask.dtype != torch.bool and not _holds_integers(mask):
        raise ValueError(
            f"mask must be boolean (True = may attend) or 0/1 integers (0 = hidden), got {mask.dtype}, which could be meant to be added "
            "to the scores; pass mask.bool() for 0 and 1, mask == 0 for -inf and 0"
        )


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _positions(n_queries: int, n_keys: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Absolute positions of the queries (T, 1) and of the keys (S,)."""
    return torch.arange(n_keys - n_queries, n_keys, device=device)[:, None], torch.arange(n_keys, device=device)
