"""The checks of a certificate: each puts one question to one subject at one length, and answers with a figure beside its bound.

B batch, T positions, S keys, H heads, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from tril.model.causality.attention_probe import formula, used_weights
from tril.model.causality.case import EOT, ODD, Cell, Result
from tril.model.causality.receptive_field import by_gradient, by_perturbation, first_leaking_block
from tril.model.causality.subject import GPTSubject, Subject


def run_checks(cell: Cell) -> Iterator[Result]:
    """All of them that the subject allows, at all lengths."""
    for length in cell.lengths:
        ids = cell.tokens(length)
        yield from reach_by_perturbation(cell, ids)
        yield from reach_by_gradient(cell, ids)
        yield from attention(cell, ids, lambda subject, ids: subject(ids))
    far = max([ODD - 1, *(w for w in cell.subject.windows if w)])  # a window must hide something
    ids = cell.tokens(3, next((n for n in cell.lengths if n > far), cell.lengths[-1]))
    yield from rows(cell, ids)
    if cell.function:
        yield from same_function(cell, ids)
        yield from documents(cell, ids)


def reach_by_perturbation(cell: Cell, ids: Tensor) -> Iterator[Result]:
    """No future: changing one token changes no logit that may not see it."""
    subject, length = cell.subject, len(ids)
    columns, changed = cell.positions(length), cell.other(ids)
    batch_size = cell.rows_at_once(length, len(columns))
    with torch.set_grad_enabled(
        subject.differentiable and subject.module.training
    ):  # for which torch has other kernels
        effect, noise = by_perturbation(subject, ids, columns, changed, batch_size)  # (T, n)
    effect = effect.cpu()
    cell.reach["perturbation"] = torch.full((length, length), torch.nan).index_copy_(1, columns.cpu(), effect.float())
    allowed = subject.visible(length)[:, columns.cpu()]  # (T, n)
    bound = cell.bound_of_hidden(noise)
    wrong = ~(effect <= bound) & ~allowed

    def where() -> str:
        query, key = first_pair(wrong, range(length), columns.tolist())
        place = f"query {query} changes with key {key}{_behind(key, query)}"
        blocks = subject.blocks()
        return (
            f"{place}, {_layer(first_leaking_block(subject, blocks, ids, changed, key, query))}"
            if len(blocks)
            else place
        )

    yield _none_of(cell, "perturbation", effect, allowed, wrong, bound, where)
    if (
        not subject.differentiable and cell.past and subject.precision in ("32-true", "64-true")
    ):  # the other way would be gradients
        yield _all_of(cell, effect, allowed, range(length), columns.tolist())


def reach_by_gradient(cell: Cell, ids: Tensor) -> Iterator[Result]:
    """No future: exactly no gradient from what may not be seen. All of the past: some gradient from everything else."""
    subject, length = cell.subject, len(ids)
    if not subject.differentiable:
        return
    rows = cell.positions(length)
    size = by_gradient(subject, subject.module, ids, rows, cell.rows_at_once(length, len(rows)), cell.generator)
    if size is None:
        return
    cell.reach["gradient"] = torch.full((length, length), torch.nan).index_copy_(0, rows.cpu(), size.float().cpu())
    size, allowed = size.cpu(), subject.visible(length)[rows.cpu()]  # (n, T)
    wrong = ~(size == 0) & ~allowed

    def where() -> str:
        query, key = first_pair(wrong, rows.tolist(), range(length))
        return f"query {query} has a gradient with respect to key {key}{_behind(key, query)}"

    yield _none_of(cell, "gradient", size, allowed, wrong, 0.0, where)
    if cell.past:
        yield _all_of(cell, size, allowed, rows.tolist(), range(length))


def attention(cell: Cell, ids: Tensor, run: Callable[[Subject, Tensor], object]) -> Iterator[Result]:
    """Of each layer and head: no weight at all on a forbidden key, and softmax(q k^T / sqrt(D)) on the others."""
    subject, length = cell.subject, len(ids)
    if not isinstance(subject, GPTSubject):
        reported = subject.weights(ids[None])
        if reported is not None:
            yield _no_forbidden_weight(cell, length, [weights[0] for weights in reported])
        return
    attentions = [block.attn for block in subject.blocks() if block.attn is not None]  # all layers have it, or none
    if subject.compiled or not attentions:  # hooks would compile it again
        return
    used = [used_weights(attn, lambda: run(subject, ids[None]), length)[0] for attn in attentions]  # (H, T, S) each
    yield _no_forbidden_weight(cell, length, used)
    if not cell.past or subject.precision != "32-true":  # rounding, or dropout, leaves no bound worth the name
        return
    config, error, bound, place = subject.module.config, 0.0, 0.0, ""
    for layer, (attn, weights) in enumerate(zip(attentions, used)):
        right, margin = formula(
            attn, lambda: run(subject, ids[None]), subject.visible(length, layer), rope=config.pos == "rope"
        )
        off = (weights.to(right.device).double() - right[0]).abs()
        wrong = torch.nonzero(~(off <= margin[0]))[:1].tolist()
        if wrong and not place:
            head, query, key = wrong[0]
            here, there = weights[head, query, key], right[0, head, query, key]
            place = f"layer {layer}, head {head}, query {query}, key {key}: weight {here:.2g} where softmax(q k / sqrt(D)) is {there:.2g}"
        error, bound = max(error, off.max().item()), max(bound, margin.max().item())
    yield cell.result("attention", length, error, bound, sum(weights.numel() for weights in used), not place, place)


def _no_forbidden_weight(cell: Cell, length: int, weights: Sequence[Tensor]) -> Result:
    """weights: (H, T, S) of each layer."""
    worst, place, tested = 0.0, "", 0
    for layer, of_layer in enumerate(weights):
        hidden = ~cell.subject.visible(length, layer).to(of_layer.device)
        of_layer = of_layer.float() * hidden
        if not place and (of_layer != 0).any():  # NaN is not 0 either
            head, query, key = torch.nonzero(of_layer)[0].tolist()
            weight = of_layer[head, query, key]
            place = (
                f"layer {layer}, head {head}, query {query}, key {key}: weight {weight:.2g} where there must be none"
            )
        worst, tested = max(worst, of_layer.abs().max().item()), tested + len(of_layer) * int(hidden.sum())
    return cell.result("attention", length, worst, 0.0, tested, not place, place)


def rows(cell: Cell, ids: Tensor) -> Iterator[Result]:
    """No row of a batch (B, T) changes with another.

    Any two rows differ in some bit of their numbers: for each bit the rows that have it change and the others are watched, and the other
    way round.
    """
    subject, (n, length) = cell.subject, ids.shape
    numbers, worst, place = torch.arange(n), 0.0, ""
    with torch.no_grad():
        same, again, changed = subject(ids), subject(ids), cell.other(ids)
        bound = cell.bound_of_hidden((same - again).abs().max().item())
        for bit, side in itertools.product(range((n - 1).bit_length()), (0, 1)):
            changing = ((numbers >> bit) & 1 == side).to(ids.device)
            effect = (subject(torch.where(changing[:, None], changed, ids)) - same).abs().amax((1, 2))  # (B,)
            effect = effect.masked_fill(changing, 0)
            row = int(effect.argmax())  # a NaN is the largest
            if not effect[row] <= worst:
                worst, place = effect[row].item(), f"row {row} changes with rows {numbers[changing.cpu()].tolist()}"
    yield cell.result("rows", length, worst, bound, n * (n - 1) * length, worst <= bound, place)


def same_function(cell: Cell, ids: Tensor) -> Iterator[Result]:
    """Decoding: in chunks of any size, and behind padding, the logits are those of the full pass."""
    subject, (n, length) = cell.subject, ids.shape
    cuts = sorted((torch.randperm(length - 1, generator=cell.generator)[: length // 8] + 1).tolist())
    chunkings = {
        f"chunks of {size}": [min(size, length - start) for start in range(0, length, size)] for size in (1, 7)
    }
    chunkings["random chunks"] = [b - a for a, b in itertools.pairwise([0, *cuts, length])]
    with torch.no_grad():
        full = subject(ids)
        for how, sizes in chunkings.items():
            logits = subject.decode(ids, sizes)
            if logits is not None:
                yield _agree(cell, "decoding", how, logits, full)
        if logits is not None and isinstance(subject, GPTSubject):
            yield from attention(cell, ids[0], lambda subject, ids: subject.decode(ids, sizes))
            ends = (torch.tensor(sizes).cumsum(0) - 1).tolist()
            yield _agree(
                cell, "decoding", f"the last of {how} alone", subject.newest(ids, sizes), full[:, ends], positions=ends
            )
        yield from behind_padding(cell, ids, full, [0, length // 2, length - 1][:n])


def behind_padding(cell: Cell, ids: Tensor, full: Tensor, padding: Sequence[int]) -> Iterator[Result]:
    """A row (of B, T) that begins behind so many hidden places has the logits `full` of the row alone, whatever tokens hide there."""
    length = ids.shape[1]
    fillings = [torch.cat([token * torch.ones_like(ids), ids], dim=1) for token in (1, 1, 2)]  # (B, 2T)
    runs = []
    for filled in fillings:
        shifted = torch.stack([row[length - p : 2 * length - p] for row, p in zip(filled, padding)])  # (B, T)
        runs.append(cell.subject.padded(shifted, padding))
    logits, again, other = runs
    if logits is None:
        return
    same = cell.bound_of_hidden(max((a[p:] - b[p:]).abs().max().item() for a, b, p in zip(logits, again, padding)))
    for row, p in enumerate(padding):
        one, how = slice(row, row + 1), f"behind {p} places of padding"
        yield _agree(cell, "decoding", how, logits[one, p:], full[one, : length - p], first_row=row)
        if p:
            yield _agree(
                cell, "decoding", f"{how}, with other tokens there", other[one, p:], logits[one, p:], same, row
            )


def documents(cell: Cell, ids: Tensor) -> Iterator[Result]:
    """Documents packed into one window have the logits that each has alone, whatever stands in the others."""
    subject, length = cell.subject, ids.shape[1]
    starts = sorted(
        {length // 4, length // 2, length // 2 + 1} & set(range(1, length))
    )  # a document of one token among them
    packed, changed = ids[:1].clone(), cell.other(ids[:1])
    packed[0, starts] = changed[0, starts] = EOT
    with torch.no_grad():
        logits, again = subject.packed(packed, EOT), subject.packed(packed, EOT)
        if logits is None:
            return
        same = cell.bound_of_hidden((logits - again).abs().max().item())
        for start, end in itertools.pairwise([0, *starts, length]):
            part, how = slice(start, end), f"the document at {start}"
            others = changed.clone()
            others[:, part] = packed[:, part]
            yield _agree(cell, "documents", how, logits[:, part], subject(packed[:, part]))
            yield _agree(
                cell, "documents", f"{how}, beside others", subject.packed(others, EOT)[:, part], logits[:, part], same
            )


def first_pair(wrong: Tensor, queries: Sequence[int], keys: Sequence[int]) -> tuple[int, int]:
    row, column = torch.nonzero(wrong)[0].tolist()
    return queries[row], keys[column]


def _none_of(
    cell: Cell, method: str, size: Tensor, allowed: Tensor, wrong: Tensor, bound: float, where: Callable[[], str]
) -> Result:
    forbidden = size[~allowed]
    worst = forbidden.max().item() if forbidden.numel() else 0.0
    place = f"by {method}: {where()}" if wrong.any() else ""
    return cell.result("no future", max(size.shape), worst, bound, forbidden.numel(), not place, place)


def _all_of(cell: Cell, size: Tensor, allowed: Tensor, queries: Sequence[int], keys: Sequence[int]) -> Result:
    blind = ~(size > 0) & allowed
    where = "query {} does not see key {}".format(*first_pair(blind, queries, keys)) if blind.any() else ""
    return cell.result(
        "all of the past", max(size.shape), size[allowed].min(), 0.0, int(allowed.sum()), not blind.any(), where
    )


def _agree(
    cell: Cell,
    check: str,
    how: str,
    logits: Tensor,
    expected: Tensor,
    bound: float | None = None,
    first_row: int = 0,
    positions: Sequence[int] | None = None,
) -> Result:
    """bound None: that of two computations of the same logits by different steps. positions: those of the logits; None: from 0 on."""
    positions = range(logits.shape[1]) if positions is None else positions
    off = (logits - expected).abs().amax(-1)  # (B, T)
    bound = cell.bound() if bound is None else bound
    bad = torch.nonzero(~(off <= bound))
    where = f"{how}: row {first_row + bad[0, 0]}, position {positions[bad[0, 1]]}" if len(bad) else ""
    return cell.result(check, positions[-1] + 1, off.max(), bound, logits.numel(), not len(bad), where)


def _behind(key: int, query: int) -> str:
    return "" if key > query else " behind the window"


def _layer(layer: int | None) -> str:
    return "behind the layers" if layer is None else "before the layers" if layer < 0 else f"first in layer {layer}"
