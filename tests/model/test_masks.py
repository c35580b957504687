import pytest
import torch

from model.masks import causal_mask, check_mask


def pattern(*rows: str) -> torch.Tensor:
    """'x' may attend, '.' may not; one string per query."""
    return torch.tensor([[cell == "x" for cell in row] for row in rows])


@pytest.mark.parametrize(
    "n_queries, n_keys, window, expected",
    [
        (3, 3, None, pattern("x..", "xx.", "xxx")),
        (2, 4, None, pattern("xxx.", "xxxx")),
        (4, 2, None, pattern("..", "..", "x.", "xx")),
        (1, 4, None, pattern("xxxx")),
        (1, 1, None, pattern("x")),
        (3, 1, None, pattern(".", ".", "x")),
        (4, 4, 1, pattern("x...", ".x..", "..x.", "...x")),
        (4, 4, 2, pattern("x...", "xx..", ".xx.", "..xx")),
        (3, 3, 3, pattern("x..", "xx.", "xxx")),
        (3, 3, 99, pattern("x..", "xx.", "xxx")),
        (2, 5, 3, pattern(".xxx.", "..xxx")),
        (1, 5, 2, pattern("...xx")),
        (4, 2, 1, pattern("..", "..", "x.", ".x")),
    ],
)
def test_causal_mask_is_the_literal_array(n_queries, n_keys, window, expected):
    mask = causal_mask(n_queries, n_keys, window=window)
    assert mask.dtype == torch.bool
    assert torch.equal(mask, expected)


def test_mask_of_a_chunk_is_the_end_of_the_whole_mask():
    whole = causal_mask(9, 9, window=4)
    for n_queries in range(1, 10):
        assert torch.equal(causal_mask(n_queries, 9, window=4), whole[-n_queries:])


@pytest.mark.parametrize("window", [0, -3])
def test_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match=f"window={window} must be at least 1"):
        causal_mask(3, 3, window=window)


def test_mask_is_made_on_the_device_asked_for():
    assert causal_mask(3, 3, device="meta").device.type == "meta"


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (5, 1), (3, 5, 7), (2, 1, 1, 7), (1, 3, 5, 7), (2, 3, 5, 7)])
def test_broadcastable_masks_pass(shape):
    check_mask(torch.ones(shape, dtype=torch.bool), (2, 3, 5, 7))


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 7), (2, 5, 7), (3, 1, 5, 7), (1, 2, 3, 5, 7)])
def test_masks_that_do_not_broadcast_are_refused(shape):
    with pytest.raises(ValueError) as error:
        check_mask(torch.ones(shape, dtype=torch.bool), (2, 3, 5, 7))
    assert str(shape) in str(error.value) and "(2, 3, 5, 7)" in str(error.value)
