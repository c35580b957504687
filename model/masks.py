"""Which key each query may attend to. Boolean, True = may attend.

B batch, T queries, S keys, H heads. Masks are built from absolute positions: the last query is at the position of the
last key, so query i is at position i + S - T. This holds with a KV cache (T < S), where torch's `is_causal=True` is
wrong.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Device = torch.device | str | None


class Masking(NamedTuple):
    """What restricts or changes the scores of a backend.

    Either `mask` says what is visible, and each query has a visible key, or `causal` and `window` do. `bias` is finite
    and comes with a mask. Both are broadcastable to (B, H, T, S).
    """

    mask: Tensor | None
    bias: Tensor | None
    causal: bool
    window: int | None


def visible_from_positions(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """The one definition of which keys a query may see: integer positions that are compared with broadcasting.

    Every backend, the KV cache and the certificate follow it. Kernels have shortcuts for the usual mask, which
    `causal_facts` takes only where the definition allows them.
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


class CausalFacts(NamedTuple):
    """The causal mask of one shape, as far as a shortcut needs to know it.

    Attributes:
        is_full: every query sees every key.
        is_triangle: T = S, and query i sees the keys 0 to i: the `is_causal` of torch's kernels.
        has_fully_masked_row: a query sees no key.
    """

    is_full: bool
    is_triangle: bool
    has_fully_masked_row: bool


def causal_facts(n_queries: int, n_keys: int, window: int | None) -> CausalFacts:
    """The facts of `causal_mask`, computed once for each definition and shape, on the CPU."""
    # torch.compile(dynamic=True) has symbols in place of sizes; the length of a range is a number.
    return _current_facts(len(range(n_queries)), len(range(n_keys)), window)


def _current_facts(*shape: int | None) -> CausalFacts:
    return _facts(visible_from_positions, *shape)


# torch.compile calls the function instead of tracing it: torch.compiler.assume_constant_result sets the same mark, and
# would import the compiler.
_current_facts._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


@functools.cache
def _facts(definition: Callable[..., Tensor], n_queries: int, n_keys: int, window: int | None) -> CausalFacts:
    with torch.device("cpu"):
        query, key = torch.arange(n_keys - n_queries, n_keys)[:, None], torch.arange(n_keys)
        visible = definition(query, key, window).expand(n_queries, n_keys)
        triangle = n_queries == n_keys and torch.equal(visible, key <= query)
        return CausalFacts(bool(visible.all()), triangle, not bool(visible.any(-1).all()))


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
    masks = [] if mask is None else [as_boolean(mask)]
    if bias is not None:
        masks.append(bias != -math.inf)  # a NaN stays visible, in the output
    if causal:
        masks.append(causal_mask(n_queries, n_keys, window=window, start=start, device=device))  # (T, S)
    return functools.reduce(torch.logical_and, masks) if masks else None


def open_fully_masked_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The rule for queries without a visible key: they attend to every key here, and their result is zeroed afterwards.

    Softmax is undefined there (0/0), and kernels differ in what they return. Zeroing the result also stops the
    gradient.

    Returns:
        mask (..., T, S) in which each row has a visible key, and the fully masked rows (..., T, 1); both bool.
    """
    fully_masked = ~mask.any(-1, keepdim=True)
    return torch.atleast_2d(mask | fully_masked), fully_masked  # torch's kernels take no mask of shape (S,)


def last_row(mask: Tensor | None) -> Tensor | None:
    """The row of the last query, (..., 1, S), of a mask or bias that broadcasts to (..., T, S)."""
    return None if mask is None else torch.atleast_2d(mask)[..., -1:, :]


def as_boolean(mask: Tensor) -> Tensor:
    """True = may attend; an integer 0 is masked. Raises ValueError for a floating-point tensor."""
    if mask.is_floating_point():
        remedy = "pass mask.bool() for 0 and 1, mask == 0 for -inf and 0"
        raise ValueError(f"mask must be boolean (True = may attend) or 0/1 integers, not {mask.dtype}; {remedy}")
    return mask if mask.dtype == torch.bool else mask != 0


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


def check_scores(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError if the mask or bias x does not broadcast to the scores: (B, H, T, S), (B, T, S) or (T, S)."""
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)  # the last ones are aligned
    if x.dim() > len(shape) or any(size not in (1, needed) for size, needed in sizes):
        raise ValueError(f"{name} of shape {tuple(x.shape)} does not broadcast to that of the scores, {shape}")
