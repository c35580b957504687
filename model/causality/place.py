"""Where a leak is: the query, the key that it depends on, and the submodule.

B batch, T positions, V vocabulary.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tril.model.causality.case import Case, largest_change
from tril.model.causality.subject import Subject
from tril.model.causality.traces import Pass, first_difference, in_words


def find_place(
    case: Case, subject: Subject, ids: Tensor, changed: Tensor, compared: Tensor, limit: float
) -> tuple[str, dict]:
    """The first leak in words, and its parts for a `Result`.

    Args:
        subject: that of the case, or its float64 twin where only that shows the leak.
        ids, changed: two batches (B, T) whose compared outputs should be equal.
        compared: bool (B, T).
        limit: how far the logits may differ.
    """
    effect = _effect(case, subject, ids, changed) * compared  # (B, T)
    row = int(effect.amax(1).argmax())
    one, other, outputs = ids[row : row + 1], changed[row : row + 1], compared[row : row + 1]
    alone = _effect(case, subject, one, other) * outputs
    if len(ids) > 1 and not alone.max() > limit:
        rest = changed.clone()
        rest[row] = ids[row]
        by_others = _effect(case, subject, ids, rest)[row]  # (T,)
        if (by_others.max() > limit).item():
            place = place_of_rows(subject, ids, rest, row, int(by_others.argmax()))
            where = f"row {row} changes with the other rows of its batch{in_words(place)}"
            return where, {"check": "rows", "place": place or ""}
        return f"row {row} changes with its hidden tokens in a batch of {len(ids)} only", {}
    query = int((alone[0] > limit).nonzero()[0]) if (alone > limit).any() else int(outputs[0].nonzero()[0])
    different = (one != other)[0].nonzero().flatten()
    keys = smallest_cause(
        different, lambda keys: bool((_effect(case, subject, one, _mixed(one, other, keys))[0, query] > limit).item())
    )
    passes = [Pass(lambda x=x: subject(x), query, x.shape[1]) for x in (one, _mixed(one, other, keys))]
    place = first_difference(subject.module, *passes, exact=not limit)
    at = f"key {int(keys[0])}" if len(keys) == 1 else f"keys {int(keys.min())} to {int(keys.max())} together"
    where = f"query {query} changes with {at}{in_words(place)}"
    return where, {"query": query, "key": int(keys[0]), "place": place or ""}


def place_of_rows(subject: Subject, ids: Tensor, changed: Tensor, row: int, query: int) -> str | None:
    """The submodule in which an output begins to differ between two batches (B, T) that have its row in common."""
    length = ids.shape[1]
    passes = [
        Pass(lambda batch=batch: subject(batch), query, length, row=row, rows=len(ids)) for batch in (ids, changed)
    ]
    return first_difference(subject.module, *passes, exact=True)


def place_of_batch(subject: Subject, ids: Tensor, query: int) -> str | None:
    """The submodule in which the first of several texts (B, T) begins to differ from the same text alone."""
    length = ids.shape[1]
    together = Pass(lambda: subject(ids), query, length, row=0, rows=len(ids))
    return first_difference(subject.module, together, Pass(lambda: subject(ids[:1]), query, length), exact=False)


def place_in_chunk(subject: Subject, ids: Tensor, sizes: Sequence[int], row: int, query: int) -> str | None:
    """The submodule in which decoding texts (B, T) in chunks begins to differ from the full pass."""
    ends = list(itertools.accumulate(sizes))
    call = next(i for i, end in enumerate(ends) if end > query)
    local, part = query - (ends[call] - sizes[call]), {"row": row, "rows": len(ids)}
    full = Pass(lambda: subject(ids), query, ids.shape[1], **part)
    return first_difference(
        subject.module, full, Pass(lambda: subject.decode(ids, sizes), local, sizes[call], call, **part), exact=False
    )


def _effect(case: Case, subject: Subject, ids: Tensor, changed: Tensor) -> Tensor:
    """(B, T)."""
    with torch.set_grad_enabled(case.trains):
        return largest_change(subject(changed), subject(ids))


def _mixed(ids: Tensor, changed: Tensor, keys: Tensor) -> Tensor:
    mixed = ids.clone()
    mixed[:, keys] = changed[:, keys]
    return mixed


def smallest_cause(keys: Tensor, leaks: Callable[[Tensor], bool]) -> Tensor:
    """Halves the changed positions for as long as one half alone still leaks."""
    while len(keys) > 1:
        half = len(keys) // 2
        part = next((part for part in (keys[:half], keys[half:]) if leaks(part)), None)
        if part is None:
            break
        keys = part
    return keys
