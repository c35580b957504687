"""The checks of a case: each asks one question of one subject at one length and returns a figure with its bound.

B batch, T positions, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tril.model.causality.attention_check import check_attention
from tril.model.causality.case import ODD_LENGTH, Case, Result, first_true, largest_change
from tril.model.causality.equivalence_checks import check_decoding, check_documents, check_reference
from tril.model.causality.generation_checks import check_generation
from tril.model.causality.place import place_of_rows
from tril.model.causality.receptive_field import dependencies_by_gradient, dependencies_by_perturbation
from tril.model.causality.redraw_checks import check_lengths, check_redrawn, check_repeatable
from tril.model.causality.traces import Pass, first_difference, in_words

RELATIVE_GRADIENT = 1e-10  # of the largest gradient in float64: its rounding


def run_checks(case: Case) -> Iterator[Result]:
    """All checks that the subject allows, at all lengths of the case; the cheapest and strictest first."""
    yield from check_repeatable(case, case.lengths[-1])
    redrawn = sorted({*case.redrawn, case.lengths[-1]})
    yield from check_redrawn(case, redrawn)
    if case.redrawn:
        yield from check_lengths(case, redrawn)
    for length in case.lengths if case.maps else ():
        ids = case.random_tokens(length)
        if case.single_tokens or not case.subject.differentiable:
            yield from check_perturbation(case, ids)
        yield from check_gradient(case, ids)
        yield from check_attention(case, ids, lambda subject, ids: subject(ids))
    minimum = max([ODD_LENGTH - 1, *(w for w in case.subject.windows if w)])  # a window must hide something
    ids = case.random_tokens(3, next((n for n in case.lengths if n > minimum), case.lengths[-1]))
    yield from check_rows(case, ids)
    if case.equivalence:
        yield from check_reference(case, ids)
        yield from check_decoding(case, ids)
        yield from check_documents(case, ids)
    if case.generation:
        yield from check_generation(case)


def check_perturbation(case: Case, ids: Tensor) -> Iterator[Result]:
    """No future: a changed token changes no logit that may not depend on it."""
    subject, length = case.subject, len(ids)
    columns, changed = case.positions(length), case.other_tokens(ids)
    with torch.set_grad_enabled(case.trains):
        batch_size = case.rows_per_batch(length, len(columns))
        effect, noise = dependencies_by_perturbation(subject, ids, columns, changed, batch_size)  # (T, n)

    def describe(query: int, key: int) -> dict[str, Any]:
        other = ids.clone()
        other[key] = changed[key]
        with torch.set_grad_enabled(case.trains):
            effect = (subject(ids[None]) - subject(other[None])).detach()[0, query]  # (V,)
        if not effect.any():
            return {"check": "rows", "where": f"query {query} changes with key {key} of another row"}
        passes = [Pass(lambda x=x: subject(x[None]), query, length) for x in (ids, other)]
        place = first_difference(subject.module, *passes, exact=not bound)
        where = f"query {query} changes with key {key}{_window(key, query)}{in_words(place)}"
        return {"where": f"by perturbation: {where}", "query": query, "key": key, "place": place or ""}

    # The past is tested by gradients where there are any, which rounding does not hide.
    past = case.full_past and not subject.differentiable and subject.precision in ("32-true", "64-true")
    bound = case.hidden_bound(noise)
    yield from _judge(case, "perturbation", effect, torch.arange(length), columns, bound, describe, past)


def check_gradient(case: Case, ids: Tensor) -> Iterator[Result]:
    """No future: exactly no gradient from hidden inputs. All of the past: some gradient from every visible one."""
    subject, length = case.subject, len(ids)
    if not subject.differentiable or subject.module is None:
        return
    rows = case.positions(length, case.max_gradients)
    batch_size = case.rows_per_batch(length, len(rows))
    size = dependencies_by_gradient(subject, subject.module, ids, rows, batch_size, case.generator)  # (n, T)
    if size is None:
        return
    bound = 0.0
    hidden = ~subject.visible(length)[rows.cpu()]
    if not subject.exact and (size.cpu() * hidden).any() and (twin := case.float64) is not None:
        # A Fourier transform or a subtracted maximum has gradients of rounding size, which float64 tells from a leak.
        assert twin.module is not None
        size = dependencies_by_gradient(twin, twin.module, ids, rows, batch_size, case.generator)
        assert size is not None
        bound = RELATIVE_GRADIENT * size.max().item()

    def describe(query: int, key: int) -> dict[str, Any]:
        where = f"by gradient: query {query} has a gradient with respect to key {key}{_window(key, query)}"
        return {"where": where, "query": query, "key": key}

    @torch.no_grad()
    def has_effect(query: int, key: int) -> bool:
        changed = ids.clone()
        changed[key] = case.other_tokens(ids)[key]
        return not torch.equal(subject(ids[None])[0, query], subject(changed[None])[0, query])

    every = torch.arange(length)
    yield from _judge(case, "gradient", size, rows, every, bound, describe, case.full_past, has_effect)


def _judge(
    case: Case,
    method: str,
    size: Tensor,
    queries: Tensor,
    keys: Tensor,
    bound: float,
    describe: Callable[[int, int], dict[str, Any]],
    past: bool,
    has_effect: Callable[[int, int], bool] = lambda query, key: False,
) -> Iterator[Result]:
    """Compares measured dependencies (queries, keys) with the expected ones, and keeps them in the case."""
    length = max(size.shape)
    tested, pairs = torch.zeros(length, length, dtype=torch.bool), (queries.cpu()[:, None], keys.cpu())
    matrix = torch.full((length, length), torch.nan, dtype=size.dtype)
    tested[pairs], matrix[pairs] = True, size.cpu()
    case.dependencies[method] = matrix.float()
    allowed = case.subject.visible(length)
    hidden, visible = tested & ~allowed, tested & allowed
    first = first_true(hidden & ~(matrix <= bound))
    leak = {"check": "no future", "where": ""} | (describe(*first) if first else {})
    worst = matrix[hidden].max().item() if hidden.any() else 0.0
    yield case.result(leak.pop("check"), length, worst, bound, int(hidden.sum()), **leak)
    if past:
        # The gradient leaves out look-ups of single tokens, whose effect a changed token shows.
        pairs = (visible & ~(matrix > 0)).nonzero().tolist()
        missing = next((pair for pair in pairs if not has_effect(*pair)), [])
        where = "query {} does not depend on key {}".format(*missing) if missing else ""
        yield case.result("all of the past", length, matrix[visible].min().item(), 0.0, int(visible.sum()), where)


def check_rows(case: Case, ids: Tensor) -> Iterator[Result]:
    """No row of a batch (B, T) changes with another.

    For each bit of the row numbers, the rows with that bit change and the others are compared, then the other way
    round. Any two rows differ in some bit, so every pair is tested.
    """
    subject, (n, length) = case.subject, ids.shape
    numbers, worst, where, found = torch.arange(n), 0.0, "", (ids, 0)
    with torch.no_grad():
        same, changed = subject(ids), case.other_tokens(ids)
        for bit, side in itertools.product(range((n - 1).bit_length()), (0, 1)):
            changing = ((numbers >> bit) & 1 == side).to(ids.device)
            effect = largest_change(subject(torch.where(changing[:, None], changed, ids)), same).amax(1)  # (B,)
            effect = effect.masked_fill(changing, 0)
            row = int(effect.argmax())
            if effect[row] > worst:
                worst, where = effect[row].item(), f"row {row} changes with rows {numbers[changing.cpu()].tolist()}"
                found = torch.where(changing[:, None], changed, ids), row
        noise = largest_change(subject(ids), same).max().item() if worst else 0.0
        bound, place = case.hidden_bound(noise), None
        if not worst <= bound:
            other, row = found
            query = int(largest_change(subject(other), same)[row].argmax())
            place = place_of_rows(subject, ids, other, row, query)
            where += in_words(place)
    where = "" if worst <= bound else where
    yield case.result("rows", length, worst, bound, n * (n - 1) * length, where, place=place or "")


def _window(key: int, query: int) -> str:
    return "" if key > query else " outside the window"
