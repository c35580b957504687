"""The checks of all hidden tokens at once: redrawn, or cut off. They find a leak; others say where it is.

Tokens that an output may not see are replaced in many texts at once, so a leak that needs a certain length, position,
token or batch is found for little more than the cost of two forward passes. B batch, T positions, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tril.model.causality.case import MAX_RELATIVE_NOISE, Case, ModelError, Result, largest_change
from tril.model.causality.place import find_place, place_of_batch
from tril.model.causality.subject import Subject
from tril.model.causality.traces import Pass, first_difference, in_words

BATCH_SIZES = (1, 5, 2, 8, 3, 16)  # taken in turn; a leak may depend on the batch size


@torch.no_grad()
def check_repeatable(case: Case, length: int) -> Iterator[Result]:
    """Two runs of one input give the same logits, alone and in a batch, up to rounding."""
    ids = case.texts.draw(3, length).to(case.subject.device)
    logits, again = case.subject(ids), case.subject(ids)
    case.scale = logits.nan_to_num().abs().max().item()
    bound = MAX_RELATIVE_NOISE * case.scale
    case.noise = largest_change(logits, again).max().item()
    where = "" if case.noise <= bound else f"two runs of the same input differ by {case.noise:.2g}"
    yield case.result("repeatable", length, case.noise, bound, logits.numel(), where)
    if case.subject.stochastic:
        return

    def change(subject: Subject) -> Tensor:
        return largest_change(subject(ids)[:1], subject(ids[:1]))  # (1, T)

    measured = largest_change(logits[:1], case.subject(ids[:1]))
    difference, bound, _ = case.judge(change, measured, exact=False)
    where, place = "", None
    if not difference <= bound:
        place = place_of_batch(case.subject, ids, int(change(case.subject)[0].argmax()))
        where = f"a text alone and in a batch of {len(ids)} differ by {difference:.2g}{in_words(place)}"
    yield case.result("repeatable", length, difference, bound, logits[0].numel(), where, place=place or "")


@torch.no_grad()
def check_redrawn(case: Case, lengths: Sequence[int], rows: int | None = None) -> Iterator[Result]:
    """No future: an output does not change when every token that it may not see is replaced.

    Each row of a batch has a query of its own; all outputs that see no more than this query are compared.

    Args:
        rows: texts at each length; None: what the budget of the case allows.
    """
    turn = 0
    for length in lengths:
        visible = case.subject.visible(length).to(case.subject.device)
        queries = case.queries(visible, rows or case.redrawn_rows(length))
        worst, bound, tested, where = 0.0, 0.0, 0, ""
        leak: dict[str, Any] = {}
        while len(queries):
            size = case.batch_size or min(
                BATCH_SIZES[turn % len(BATCH_SIZES)], case.rows_per_batch(length, len(queries))
            )
            part, queries, turn = queries[:size], queries[size:], turn + 1
            if case.batch_size:  # a compiled model takes no other size
                part = part.repeat(math.ceil(size / len(part)))[:size]
            ids = case.texts.draw(len(part), length).to(case.subject.device)
            changed = torch.where(visible[part], ids, case.texts.other(ids.cpu()).to(ids.device))
            compared = (visible[None] & ~visible[part][:, None]).any(-1).logical_not()  # (B, T)
            effect, limit, judge = _changes(case, ids, changed, compared)
            tested += int(compared.sum())
            if not effect <= limit and not where:
                where, leak = find_place(case, judge, ids, changed, compared, limit)
            worst, bound = max(worst, effect), max(bound, limit)
        yield case.result(leak.pop("check", "no future"), length, worst, bound, tested, where, **leak)
        if where:
            return  # other lengths show the same leak


def _changes(case: Case, ids: Tensor, changed: Tensor, compared: Tensor) -> tuple[float, float, Subject]:
    """Largest change of the logits at the compared outputs (B, T), as `Case.judge` returns it."""

    def change(subject: Subject) -> Tensor:
        chosen = compared.to(subject.device)
        return largest_change(subject(changed)[chosen], subject(ids)[chosen])  # (compared outputs,)

    with torch.set_grad_enabled(case.trains):
        measured = change(case.subject)
        case.inexact |= bool(measured.any())
        return case.judge(change, measured, exact=case.subject.exact)


@torch.no_grad()
def check_lengths(case: Case, lengths: Sequence[int]) -> Iterator[Result]:
    """No future: the logits of a text do not change when it is cut off at any length.

    Passes of different shapes round differently, so they are compared in float64 where that is possible.
    """
    if case.subject.stochastic:
        return
    longest = max(lengths)
    ids = case.texts.draw(3, longest)
    subject = case.subject if case.float64 is None else case.float64
    bound = case.bound() if case.float64 is None else case.float64_bound()
    visible, full = subject.visible(longest), torch.cat([subject(row) for row in ids.split(1)])
    worst, tested, where = 0.0, 0, ""
    leak: dict[str, Any] = {}
    for number, length in enumerate(lengths):
        if length == longest or not torch.equal(visible[:length, :length], subject.visible(length)):
            continue
        compared = ~visible[:length, length:].any(-1)  # (n,)
        row = slice(number % len(ids), number % len(ids) + 1)
        try:
            short = (subject(ids[row, :length]) - full[row, :length]).abs().amax(-1)[0]  # (n,)
        except ModelError:  # such as statistics of a single number
            continue
        short = short.nan_to_num(nan=torch.inf).cpu() * compared
        tested += int(compared.sum())
        if not short.max() <= bound and not where:
            query = int(short.argmax())
            texts = (ids[row], longest), (ids[row, :length], length)
            passes = [Pass(lambda text=text: subject(text), query, size) for text, size in texts]
            place = first_difference(subject.module, *passes, exact=False)
            where = f"query {query} changes if the text ends after {length} instead of {longest} tokens"
            where, leak = where + in_words(place), {"query": query, "key": length, "place": place or ""}
        worst = max(worst, short.max().item())
    if tested:
        yield case.result("no future", longest, worst, bound, tested, where, **leak)
