"""Mistakes that texts about attention print: how wrong each one is, and that `attention` does not make it.

`docs/attention.md` names the texts.
"""

import math

import pytest
import torch
from torch import Tensor

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close
from tests.model.printed import assert_prints_as
from tril.model.attention import MultiHeadAttention, attention
from tril.model.masks import causal_mask

B, H, T, D = 4, 8, 32, 64


def scores_of(weights: Tensor) -> Tensor:
    """The scores up to a constant per row, float64; only where every weight is positive."""
    scores = weights.double().log()
    return scores - scores.mean(-1, keepdim=True)


# --- scores // sqrt(D): a floor


def test_the_floor_gives_the_published_last_row():
    """Scores 0.5, 2, 1.5 become 0, 2, 1. The other rows of that text hold whole numbers, which a floor keeps."""
    scores = torch.tensor([[2.0, 7.0, 7.0], [1.0, 3.0, 7.0], [0.5, 2.0, 1.5]])
    floored = (scores // 1).masked_fill(~causal_mask(3, 3), -math.inf).softmax(-1)
    assert_prints_as(floored, [[1.0000, 0.0000, 0.0000], [0.1192, 0.8808, 0.0000], [0.0900, 0.6652, 0.2447]])
    _, weights = attention(torch.zeros(3, 1), torch.zeros(3, 1), torch.zeros(3, 1), bias=scores, need_weights=True)
    assert_prints_as(weights[2], [0.1220, 0.5465, 0.3315])


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_the_floor_of_the_scores_is_wrong_by_up_to_1(backend):
    """The floor lowers each score by 0 to 1, evenly distributed, so a ratio of two weights is wrong by up to e."""
    q, k = torch.randn(2, B, H, T, D)
    values = torch.eye(T, D).expand(B, H, T, D)  # the first T outputs are the weights
    exact = q.double() @ k.double().mT / math.sqrt(D)
    floored = q.double() @ k.double().mT // math.sqrt(D)

    loss = exact - floored
    assert 0 <= loss.min() and loss.max() < 1
    n = loss.numel()
    assert abs(loss.mean().item() - 0.5) < 5 / math.sqrt(12 * n)  # five standard errors of a uniform distribution
    ratio = exact.softmax(-1) / floored.softmax(-1)
    assert 2 < (ratio.amax(-1) / ratio.amin(-1)).mean() < math.e

    out = attention(q, k, values, backend=backend)[..., :T]
    assert (scores_of(out) - scores_of(exact.softmax(-1))).abs().max() < 1e-4
    assert (scores_of(out) - scores_of(floored.softmax(-1))).abs().max() > 0.5


@pytest.mark.parametrize("backend", TRAINABLE)
def test_the_floor_has_no_gradient(backend):
    q = torch.randn(1, 1, T, D, requires_grad=True)
    k, v = torch.randn(2, 1, 1, T, D)
    with pytest.raises(RuntimeError, match="not implemented"):
        (q @ k.mT // math.sqrt(D)).softmax(-1).matmul(v).square().sum().backward()
    attention(q, k, v, backend=backend).square().sum().backward()
    assert q.grad is not None and (q.grad != 0).all()


# --- masked_fill(mask == 0, -1e9)


def minus_1e9(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return scores.masked_fill(mask == 0, -1e9).softmax(-1) @ v


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_minus_1e9_returns_the_mean_of_hidden_values_in_a_fully_masked_row(backend):
    """All scores of the row are -1e9, and softmax makes 1/S of each: hidden values reach the output."""
    q, k, v = torch.randn(3, B, H, T, D)
    mask = causal_mask(T, T) & (torch.arange(T) >= 3)  # three tokens of padding on the left: rows 0 to 2 see nothing
    wrong = minus_1e9(q, k, v, mask)
    assert_close(wrong[..., :3, :], v.mean(-2, keepdim=True).expand(B, H, 3, D))
    out = attention(q, k, v, mask=mask, backend=backend)
    assert (out[..., :3, :] == 0).all()
    assert_close(out[..., 3:, :], wrong[..., 3:, :])  # rows that see a key agree


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_minus_1e9_lets_the_future_change_a_fully_masked_row(backend):
    q, k, v = torch.randn(3, 1, 1, T, D)
    mask = causal_mask(T, T) & (torch.arange(T) > 0)
    changed = v.clone()
    changed[..., -1, :] += T
    assert_close((minus_1e9(q, k, changed, mask) - minus_1e9(q, k, v, mask))[..., 0, :], torch.ones(1, 1, D))
    before, after = (attention(q, k, values, mask=mask, backend=backend) for values in (v, changed))
    assert torch.equal(before[..., :-1, :], after[..., :-1, :])


def test_minus_1e9_does_not_exist_in_float16():
    scores = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="overflow"):
        scores.masked_fill(torch.tensor([True, False]), -1e9)
    q, k, v = torch.randn(3, 1, 1, 4, 8).half()
    out = attention(q, k, v, causal=True, backend="explicit")
    assert torch.equal(out[..., 0, :], v[..., 0, :])  # the first query sees its own value alone


# --- the order of the steps


def test_scaling_after_softmax_gives_rows_that_sum_to_1_over_sqrt_d():
    q, k, v = torch.randn(3, T, D)
    wrong = (q @ k.mT).softmax(-1) / math.sqrt(D)
    assert_close(wrong.sum(-1), torch.full((T,), 1 / 8))
    _, weights = attention(q, k, v, need_weights=True)
    assert_close(weights.sum(-1), torch.ones(T))


def test_a_mask_after_softmax_leaves_the_future_in_the_denominator():
    """Zeroing weights hides the values of the future, but the keys of the future still change the result."""
    q, k, v = torch.randn(3, T, D)
    changed = k.clone()
    changed[-1] += q[0]

    def mask_after_softmax(keys: Tensor) -> Tensor:
        return (q @ keys.mT / math.sqrt(D)).softmax(-1).tril() @ v

    assert (mask_after_softmax(changed) - mask_after_softmax(k))[0].abs().max() > 1e-3
    assert torch.equal(attention(q, changed, v, causal=True)[:-1], attention(q, k, v, causal=True)[:-1])


# --- shapes


def test_keys_may_be_longer_than_queries():
    """A text reshapes keys and values with the length of the queries, so its cross-attention needs equal lengths."""
    x, context = torch.randn(2, 5, 24), torch.randn(2, 7, 24)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        context.view(2, x.shape[1], 4, 6)
    assert MultiHeadAttention(24, 4)(x, context).shape == (2, 5, 24)
