"""Checks that compare other ways to compute the same logits with the full pass: decoding, padding, packed documents.

B batch, T positions, V vocabulary.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tril.model.causality.attention_check import check_attention
from tril.model.causality.case import EOT, Case, Result, first_true
from tril.model.causality.place import place_in_chunk
from tril.model.causality.traces import in_words


@torch.no_grad()
def check_decoding(case: Case, ids: Tensor) -> Iterator[Result]:
    """Decoding ids (B, T) in chunks of any size gives the logits of the full pass, and so does padding on the left."""
    subject, (n, length) = case.subject, ids.shape
    cuts = sorted((torch.randperm(length - 1, generator=case.generator)[: length // 8] + 1).tolist())
    sizes = [b - a for a, b in itertools.pairwise([0, *cuts, length])]
    chunkings = {f"chunks of {n}": [min(n, length - start) for start in range(0, length, n)] for n in (1, 7)}
    full = subject(ids)
    for how, chunks in (chunkings | {"random chunks": sizes}).items():
        yield from _decode(case, ids, full, how, chunks)
    ends, n_prompt = (torch.tensor(sizes).cumsum(0) - 1).tolist(), length // 2
    if (last := subject.decode_last(ids, sizes)) is not None:
        yield from check_attention(case, ids[0], lambda subject, ids: subject.decode(ids, sizes))
        yield _compare(case, "decoding", "last position of random chunks", last, full[:, ends], positions=ends)
    if (steps := subject.decode_steps(ids, n_prompt)) is not None:
        positions, how = range(n_prompt, length), "steps of constant shape"
        yield _compare(case, "decoding", how, steps, full[:, n_prompt:], positions=positions)
    yield from check_padding(case, ids, full, [0, length // 2, length - 1][:n])


@torch.no_grad()
def check_steps(case: Case, ids: Tensor) -> Iterator[Result]:
    """Decoding ids (B, T) token by token, which never sees a later one, gives the logits of the full pass."""
    yield from _decode(case, ids, case.subject(ids), "chunks of 1", [1] * ids.shape[1])


def _decode(case: Case, ids: Tensor, full: Tensor, how: str, chunks: Sequence[int]) -> Iterator[Result]:
    """Compares the logits of decoding in chunks with those of the full pass."""
    logits = case.subject.decode(ids, chunks)
    if logits is None:
        return
    result = _compare(case, "decoding", how, logits, full)
    if not result.passed:
        row, query = first_true(~((logits - full).abs().amax(-1) <= result.bound))
        place = place_in_chunk(case.subject, ids, chunks, row, query)
        result = replace(result, query=query, place=place or "", where=result.where + in_words(place))
    yield result


def check_padding(case: Case, ids: Tensor, full: Tensor, padding: Sequence[int]) -> Iterator[Result]:
    """Row b of ids (B, T), left-padded by padding[b] tokens, has the logits `full`, whatever the padding tokens are."""
    length = ids.shape[1]

    def run(filler: int) -> Tensor | None:
        filled = torch.cat([torch.full_like(ids, filler), ids], dim=1)  # (B, 2T)
        shifted = [row[length - p : 2 * length - p] for row, p in zip(filled, padding, strict=True)]
        return case.subject.padded(torch.stack(shifted), padding)

    logits, again, other = run(1), run(1), run(2)
    if logits is None or again is None or other is None:
        return
    noise = max((a[p:] - b[p:]).abs().max().item() for a, b, p in zip(logits, again, padding, strict=True))
    bound = case.hidden_bound(noise)
    for row, p in enumerate(padding):
        one, how = slice(row, row + 1), f"left-padded by {p} tokens"
        yield _compare(case, "padding", how, logits[one, p:], full[one, : length - p], row=row)
        if p:
            how += ", with other padding tokens"
            yield _compare(case, "padding", how, other[one, p:], logits[one, p:], bound, row=row)


@torch.no_grad()
def check_reference(case: Case, ids: Tensor) -> Iterator[Result]:
    """The logits of ids (B, T) are those of the same function without special kernels, where there are any."""
    plain = case.subject.plain()
    if plain is not case.subject:
        how = "compared with the explicit backend"
        yield _compare(case, "reference", how, case.subject(ids), plain(ids))


@torch.no_grad()
def check_documents(case: Case, ids: Tensor) -> Iterator[Result]:
    """Documents packed into one window have the logits that each has alone, for any tokens in the other documents."""
    subject, length = case.subject, ids.shape[1]
    # One document has a single token.
    starts = sorted({length // 4, length // 2, length // 2 + 1} & set(range(1, length)))
    packed, changed = ids[:1].clone(), case.other_tokens(ids[:1])
    packed[0, starts] = changed[0, starts] = EOT
    logits, again = subject.packed(packed, EOT), subject.packed(packed, EOT)
    if logits is None or again is None:
        return
    bound = case.hidden_bound((logits - again).abs().max().item())
    for start, end in itertools.pairwise([0, *starts, length]):
        part, how = slice(start, end), f"the document at {start}"
        yield _compare(case, "documents", how, logits[:, part], subject(packed[:, part]))
        others_changed = changed.clone()
        others_changed[:, part] = packed[:, part]
        other, how = subject.packed(others_changed, EOT), f"{how}, with other documents changed"
        assert other is not None
        yield _compare(case, "documents", how, other[:, part], logits[:, part], bound)


def _compare(
    case: Case,
    check: str,
    how: str,
    logits: Tensor,
    expected: Tensor,
    bound: float | None = None,
    *,
    row: int = 0,
    positions: Sequence[int] | None = None,
) -> Result:
    """Compares two computations (B, T, V) of the same logits.

    Args:
        bound: None: that of two computations by different steps.
        row: number of the first row.
        positions: of the logits; None: from 0 on.
    """
    positions = range(logits.shape[1]) if positions is None else positions
    difference = (logits - expected).abs().amax(-1)  # (B, T)
    bound = case.bound() if bound is None else bound
    wrong = first_true(~(difference <= bound))
    where = f"{how}: row {row + wrong[0]}, position {positions[wrong[1]]}" if wrong else ""
    return case.result(check, positions[-1] + 1, difference.max().item(), bound, logits.numel(), where)
