"""Masks against loops over positions.

B batch, T queries, S keys.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_close, tiny_gpt
from tril.model.masks import (
    Masking,
    causal_mask,
    check_masking,
    document_mask,
    document_options,
    padding_mask,
    split_documents,
)

DRAWN = settings(deadline=None, max_examples=100, derandomize=True)


@DRAWN
@given(st.integers(0, 6), st.integers(0, 7), st.sampled_from([None, 1, 2, 3, 10]))
def test_the_causal_mask_is_that_of_a_loop(n_queries, n_keys, window):
    """Query i is at position i + S - T."""
    positions = [i + n_keys - n_queries for i in range(n_queries)]
    expected = [[j <= i and (window is None or i - j < window) for j in range(n_keys)] for i in positions]
    assert causal_mask(n_queries, n_keys, window=window).tolist() == expected
    start = torch.tensor([n_keys - n_queries])
    assert causal_mask(n_queries, n_keys, window=window, start=start).tolist() == expected


@DRAWN
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_documents_begin_with_their_end_of_text_token(rows):
    ids = torch.tensor(rows)
    documents, positions = split_documents(ids, 0)
    for row, numbers, places in zip(rows, documents.tolist(), positions.tolist(), strict=True):
        starts = [i for i, token in enumerate(row) if token == 0]
        assert numbers == [sum(start <= i for start in starts) for i in range(5)]
        assert places == [i - max([0, *(start for start in starts if start <= i)]) for i in range(5)]
    same = document_mask(documents)[:, 0]
    assert same.tolist() == [[[a == b for b in row] for a in row] for row in documents.tolist()]
    options = document_options(ids, 0)
    assert torch.equal(options["mask"][:, 0], same) and torch.equal(options["positions"], positions)
    assert document_options(ids, None) == {}


@torch.no_grad()
def test_padded_rows_equal_the_rows_without_padding():
    model, ids = tiny_gpt(), torch.randint(31, (2, 6))
    visible = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    logits = model(ids, mask=padding_mask(visible), positions=visible.cumsum(1).sub(1).clamp(min=0))
    assert_close(logits[:1, 2:], model(ids[:1, 2:]))
    assert_close(logits[1:], model(ids[1:]))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: causal_mask(3, 3, window=0), "window=0 must be at least 1"),
        (lambda: check_masking(Masking(None, None, False, 3), ()), "window=3 .* needs causal=True"),
        (lambda: padding_mask(torch.ones(2, 3)), r"torch.float32.*mask.bool\(\)"),
        (lambda: check_masking(Masking(torch.ones(2, 5).bool(), None, False, None), (2, 3, 4, 5)),
         r"mask of shape \(2, 5\) does not broadcast to \(B, H, T, S\) = \(2, 3, 4, 5\)"),
        (lambda: check_masking(Masking(None, torch.ones(3, 4), False, None), (4, 3)),
         r"bias of shape \(3, 4\) does not broadcast to \(T, S\) = \(4, 3\)"),
        (lambda: check_masking(Masking(None, torch.ones(3).bool(), False, None), (3, 3)), "bias must be floating poin"),
    ],
)  # fmt: skip
def test_wrong_masks_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
