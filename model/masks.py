"""Which key each query may attend to. Boolean, True = may attend.

B batch, T queries, S keys, H heads. Masks are built from absolute positions: the last query is at the position of the
last key, so query i is at position i + S - T. This holds with a KV cache (T < S), where torch's `is_causal=True` is
wrong.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Device = torch.device | str | None
CausalShape = Literal["full", "triangle", "other"]


def visible_from_positions(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """The one definition of which keys a query may see: integer positions that are compared with broadcasting.

    Every backend, the KV cache and the certificate follow it. `causal_shape` tells where a kernel may take a shortcut.
    """
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


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
    check_window(window, causal=True)
    first = n_keys - n_queries if start is None else start
    query = torch.arange(n_queries, device=device)[:, None] + first  # (T, 1)
    visible = visible_from_positions(query, torch.arange(n_keys, device=device), window)
    return visible.expand(n_queries, n_keys)  # (T, S)


def causal_shape(n_queries: int, n_keys: int, window: int | None) -> CausalShape:
    """The shape of `causal_mask`, from its elements, which are computed once.

    Returns:
        "full": every query sees every key. "triangle": T = S, and query i sees the keys 0 to i, which is `is_causal` of
        torch's kernels. "other": neither.
    """
    # torch.compile(dynamic=True) has symbols in place of sizes; the length of a range is a number.
    return _current_shape(len(range(n_queries)), len(range(n_keys)), window)


def _current_shape(*sizes: int | None) -> CausalShape:
    return _shape_of(visible_from_positions, *sizes)


# torch.compile calls the function instead of tracing it: torch.compiler.assume_constant_result sets the same mark, and
# would import the compiler.
_current_shape._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _shape_of(definition: Callable[..., Tensor], n_queries: int, n_keys: int, window: int | None) -> CausalShape:
    with torch.device("cpu"):
        query, key = torch.arange(n_keys - n_queries, n_keys)[:, None], torch.arange(n_keys)
        visible = definition(query, key, window).expand(n_queries, n_keys)
        if visible.all():
            return "full"
        return "triangle" if n_queries == n_keys and torch.equal(visible, key <= query) else "other"


def visible_keys(
    n_queries: int,
    n_keys: int,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    window: int | None,
    start: Tensor | None = None,
    device: Device,
) -> Tensor | None:
    """`mask`, the causal mask and the -inf of `bias` as one mask, broadcastable to (B, H, T, S); None: none of them.

    Arguments as in `causal_mask` and `tril.model.attention.attention`.
    """
    masks = [] if mask is None else [mask.bool()]
    if bias is not None:
        masks.append(bias != -math.inf)  # a NaN stays visible, in the output
    if causal:
        masks.append(causal_mask(n_queries, n_keys, window=window, start=start, device=device))  # (T, S)
    return functools.reduce(torch.logical_and, masks) if masks else None


def document_options(ids: Tensor, document_eot: int | None) -> dict[str, Any]:
    """The mask and positions of `GPT.forward` and `GPT.nll` that separate the documents in packed ids (B, T).

    The end-of-text token belongs to the document that it starts, at position 0: it is the last target of one document,
    and each new document begins with it, in generation as well. Tokens before the first one are the rest of document 0.

    Args:
        document_eot: the id of the end-of-text token; None: a row is one text, and there are no options.
    """
    if document_eot is None:
        return {}
    is_start = ids == document_eot
    documents, column = is_start.cumsum(1), torch.arange(ids.shape[1], device=ids.device)  # (B, T), (T,)
    start = torch.where(is_start, column, 0).cummax(1).values  # (B, T), the column where the token's document starts
    return {"mask": documents[:, None, :, None] == documents[:, None, None, :], "positions": column - start}


def check_window(window: int | None, *, causal: bool) -> None:
    """Raises ValueError for a window below 1, or without the causal mask."""
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1 (a query sees itself); use None to see all of the past")
    if window is not None and not causal:
        raise ValueError(f"window={window} counts back from the query's own position and needs causal=True")
