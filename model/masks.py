"""Which key each query may attend to. Boolean, True = may attend.

B batch, T queries, S keys, H heads. Masks are built from absolute positions: the last query is at the position of the
last key, so query i is at position i + S - T. This holds with a KV cache (T < S), where torch's `is_causal=True` is
wrong.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

Device = torch.device | str | None


class Masking(NamedTuple):
    """What restricts or changes the scores of a backend.

    Either `mask` says what is visible, and each query has a visible key, or `causal` and `window` do. `bias` is finite
    and comes with a mask.

    Attributes:
        mask: bool, True = may attend; broadcastable to (B, H, T, S).
        bias: floating point, added to the scaled scores; broadcastable to (B, H, T, S).
    """

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    window: int | None


def causal_mask(
    n_queries: int, n_keys: int, *, window: int | None = None, start: Tensor | None = None, device: Device = None
) -> Tensor:
    """Causal mask: key j is visible to query i if position(j) <= position(i).

    Where T > S, the first T - S queries precede the first key and see nothing.

    Args:
        window: each query attends to its own position and the `window - 1` before it; None: to all of them.
        start: position of the first query, (1,) int64; None: the last query is at the position of the last key.

    Returns:
        (T, S) bool.

    Raises:
        ValueError: `window` < 1.
    """
    if window is not None:
        check_window(window)
    first = n_keys - n_queries if start is None else start
    query = torch.arange(n_queries, device=device)[:, None] + first  # (T, 1)
    return visible_from_positions(query, torch.arange(n_keys, device=device), window)  # (T, S)


def visible_from_positions(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """The one definition of causal visibility: absolute positions of queries and keys are compared with
    broadcasting.
    """
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def visible_keys(
    n_queries: int,
    n_keys: int,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: int | None,
    device: Device,
) -> Tensor | None:
    """`mask`, the causal mask and the -inf of `bias` as one boolean mask, broadcastable to (B, H, T, S).

    None if nothing is masked.
    """
    visible = None if mask is None else as_boolean(mask)
    if bias is not None:
        finite = bias != -math.inf  # a NaN stays visible, in the output
        visible = finite if visible is None else finite & visible
    if causal:
        causal_part = causal_mask(n_queries, n_keys, window=window, device=device)  # (T, S)
        visible = causal_part if visible is None else causal_part & visible
    return visible


def open_fully_masked_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for queries without a visible key: they attend to every key here, and their result is zeroed afterwards.

    Softmax is undefined there (0/0), and kernels differ in what they return. Zeroing the result also stops the
    gradient.

    Returns:
        mask (..., T, S) in which each row has a visible key, and the fully masked rows (..., T, 1); both bool.
    """
    fully_masked = ~mask.any(-1, keepdim=True)
    return torch.atleast_2d(mask | fully_masked), fully_masked  # torch's kernels take no mask of shape (S,)


def prefix_mask(n_queries: int, n_keys: int, prefix_length: int | Tensor, *, device: Device = None) -> Tensor:
    """Mask of a prefix language model (Raffel et al. 2020, section 3.2.1).

    The first `prefix_length` positions attend to each other in both directions, later ones to all of the past. It
    replaces the causal mask, so the module needs causal=False: with causal=True the prefix would be causal as well.

    Args:
        prefix_length: an integer, or a tensor of integers (B,). The values of a tensor are not checked, which would
            synchronize with the GPU.

    Returns:
        bool (T, S), or (B, 1, T, S) for a `prefix_length` of shape (B,).

    Raises:
        ValueError: a negative integer, or a tensor of another shape or dtype.
    """
    prefix = torch.as_tensor(prefix_length, device=device)
    if prefix.dim() > 1 or not _holds_integers(prefix):
        given = f"prefix_length of shape {tuple(prefix.shape)} and {prefix.dtype}"
        raise ValueError(f"{given} must be an integer, or integers (B,), one per row")
    if not isinstance(prefix_length, Tensor) and prefix_length < 0:
        raise ValueError(f"prefix_length={prefix_length} must be at least 0 (0: a causal mask)")
    if prefix.dim() == 1:
        prefix = prefix[:, None, None, None]  # (B, 1, 1, 1)
    query = torch.arange(n_keys - n_queries, n_keys, device=prefix.device)[:, None]  # (T, 1)
    key = torch.arange(n_keys, device=prefix.device)  # (S,)
    # A query that precedes the first key (T > S) is not part of the prefix.
    return visible_from_positions(query, key, None) | ((query >= 0) & (key < prefix))  # (T, S) or (B, 1, T, S)


def padding_mask(visible: Tensor) -> Tensor:
    """Masks padding tokens.

    The convention is that of `scores.masked_fill(mask == 0, -inf)` and of the `attention_mask` that Hugging Face
    tokenizers return. Left-padded rows also need `positions` per row. A row of padding only is fully masked and gives
    zeros.

    Args:
        visible: (B, S), boolean or 0/1 integers, 0 = padding; S counts the cached positions too.

    Returns:
        (B, 1, 1, S) bool.

    Raises:
        ValueError: another shape, or a floating-point tensor.
    """
    if visible.dim() != 2:
        raise ValueError(
            f"padding of shape {tuple(visible.shape)} must be (B, S): one 0 (padding) or 1 per key and row"
        )
    return as_boolean(visible)[:, None, None]


def document_mask(documents: Tensor) -> Tensor:
    """Separates the documents of a packed window: document numbers (B, T) -> bool (B, 1, T, T), True in the same
    document.

    The model adds the causal mask.
    """
    return documents[:, None, :, None] == documents[:, None, None, :]


def split_documents(ids: Tensor, eot_id: int) -> tuple[Tensor, Tensor]:
    """Numbers the documents of packed token ids (B, T).

    The end-of-text token belongs to the document that it starts, at position 0: it is the last target of one document,
    and each new document begins with it, in generation as well. Tokens before the first one are the rest of document 0.

    Returns:
        The document of each token and the token's position in it, int64 (B, T) each.
    """
    is_start = ids == eot_id
    column = torch.arange(ids.shape[1], device=ids.device)  # (T,)
    start = torch.where(is_start, column, 0).cummax(1).values  # (B, T), the column where the token's document starts
    return is_start.cumsum(1), column - start


def document_options(ids: Tensor, document_eot: int | None) -> dict[str, Any]:
    """Options for `GPT.forward` and `GPT.nll` that separate the documents in ids (B, T); {} for None.

    The last token of a document predicts the token that opens the next one, so no target needs another document.
    """
    if document_eot is None:
        return {}
    documents, positions = split_documents(ids, document_eot)  # (B, T) each
    return {"mask": document_mask(documents), "positions": positions}


def check_window(window: int, causal: bool = True) -> None:
    """Raises ValueError for a window below 1, or without `causal`."""
    if window < 1:
        raise ValueError(f"window={window} must be at least 1 (a query sees itself); use None to see all of the past")
    if not causal:
        raise ValueError(f"window={window} counts back from the query's own position and needs causal=True")


def check_masking(masking: Masking, shape: tuple[int, ...]) -> None:
    """Raises ValueError for a wrong window, mask or bias.

    The mask is boolean or of integers, the bias of floating-point numbers, and both broadcast to `shape`, which is
    (B, H, T, S), (B, T, S) or (T, S).
    """
    mask, bias, causal, window = masking
    if window is not None:
        check_window(window, causal)
    if mask is not None:
        _check_dtype(mask)
        _check_shape("mask", mask, shape)
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(f"bias must be floating point, not {bias.dtype}; a boolean or 0/1 mask is given as mask")
        _check_shape("bias", bias, shape)


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)  # broadcasting aligns the last dimensions
    if x.dim() > len(shape) or any(size not in (1, expected) for size, expected in sizes):
        letters = ", ".join(["B", "H", "T", "S"] if len(shape) == 4 else ["B", "T", "S"][-len(shape) :])
        remedy = (
            "; padding of shape (B, S) goes through tril.model.masks.padding_mask"
            if name == "mask" and len(shape) == 4
            else ""
        )
        raise ValueError(f"{name} of shape {tuple(x.shape)} does not broadcast to ({letters}) = {tuple(shape)}{remedy}")


def last_row(mask: Tensor | None) -> Tensor | None:
    """The row of the last query, (..., 1, S), of a mask or bias that broadcasts to (..., T, S)."""
    return None if mask is None else torch.atleast_2d(mask)[..., -1:, :]


def as_boolean(mask: Tensor) -> Tensor:
    """True = may attend; an integer 0 is masked. Raises ValueError for a floating-point tensor."""
    _check_dtype(mask)
    return mask if mask.dtype == torch.bool else mask != 0


def _check_dtype(mask: Tensor) -> None:
    if mask.dtype != torch.bool and not _holds_integers(mask):
        raise ValueError(
            f"mask must be boolean (True = may attend) or 0/1 integers (0 = masked), not {mask.dtype}, which may be an "
            "additive mask; pass mask.bool() for 0 and 1, mask == 0 for -inf and 0"
        )


def _holds_integers(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
