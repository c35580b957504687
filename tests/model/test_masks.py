"""Documents and padding against loops over positions and rows without padding; the contract has the causal mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_close, tiny_gpt
from tril.model.masks import Masking, causal_mask, check_masking, document_options


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_documents_begin_with_their_end_of_text_token(rows):
    options = document_options(torch.tensor(rows), 0)
    for row, mask, positions in zip(rows, options["mask"][:, 0].tolist(), options["positions"].tolist(), strict=True):
        starts = [i for i, token in enumerate(row) if token == 0]
        numbers = [sum(start <= i for start in starts) for i in range(5)]
        assert mask == [[a == b for b in numbers] for a in numbers]
        assert positions == [i - max([0, *(start for start in starts if start <= i)]) for i in range(5)]
    assert document_options(torch.tensor(rows), None) == {}


@torch.no_grad()
def test_padded_rows_equal_the_rows_without_padding_and_a_step_has_a_row_of_the_mask():
    model, ids = tiny_gpt(), torch.randint(31, (2, 6))
    visible = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    logits = model(ids, mask=visible[:, None, None], positions=visible.cumsum(1).sub(1).clamp(min=0))
    assert_close(logits[:1, 2:], model(ids[:1, 2:]))
    assert_close(logits[1:], model(ids[1:]))
    start = torch.tensor([4])
    assert torch.equal(causal_mask(1, 7, window=3, start=start), causal_mask(5, 7, window=3, start=start - 4)[4:])


@pytest.mark.parametrize(
    "masking, shape, message",
    [
        (Masking(None, None, False, 3), (), "window=3 .* needs causal=True"),
        (Masking(torch.ones(2, 5).bool(), None, False, None), (2, 3, 4, 5), r"mask of shape \(2, 5\) does not broad"),
        (Masking(torch.ones(1, 1, 4).bool(), None, False, None), (3, 4), r"mask of shape \(1, 1, 4\) does not broad"),
        (Masking(torch.ones(3), None, False, None), (3, 3), r"torch.float32.*mask.bool\(\)"),
        (Masking(None, torch.ones(3).bool(), False, None), (3, 3), "bias must be floating poin"),
    ],
)
def test_wrong_masks_are_refused(masking, shape, message):
    with pytest.raises(ValueError, match=message):
        check_masking(masking, shape)
