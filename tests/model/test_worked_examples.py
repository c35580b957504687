"""Attention on small examples with the numbers that a calculation by hand gives.

The numbers that single texts print are in the other files test_worked_examples_*.py.

B batch, T queries, S keys, H heads, D head size, C width.
"""

import math
from statistics import NormalDist

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, assert_close
from tests.model.printed import assert_prints_as
from tril.model.attention import MultiHeadAttention, attention, attention_weights
from tril.model.masks import causal_mask

# --- three words: scores, mask, softmax

SCORES = [
    [2.0, 7.0, 7.0],  # the scores 7 are in the future: large, so that a leak is visible
    [1.0, 3.0, 7.0],
    [0.5, 2.0, 1.5],
]
# Row by row the softmax of [2], of [1, 3] and of [0.5, 2, 1.5]:
#   e^1 / (e^1 + e^3) = 2.718 / 22.804 = 0.1192
#   e^0.5 + e^2 + e^1.5 = 1.6487 + 7.3891 + 4.4817 = 13.5195, and 1.6487 / 13.5195 = 0.1220
WEIGHTS = [[1.0000, 0.0000, 0.0000], [0.1192, 0.8808, 0.0000], [0.1220, 0.5465, 0.3315]]


def queries_and_keys(scores) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k (1, 1, n, n) whose q k^T / sqrt(D) are the n x n `scores`: the keys are the unit vectors, D = n."""
    scores = torch.tensor(scores)
    return (scores * math.sqrt(len(scores)))[None, None], torch.eye(len(scores))[None, None]


def test_three_words():
    q, k = queries_and_keys(SCORES)
    weights = attention_weights(q, k, causal_mask(3, 3))
    assert_prints_as(weights[0, 0], WEIGHTS)
    assert weights[0, 0].triu(1).count_nonzero() == 0  # exactly 0 for the future


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_three_words_on_every_backend(backend):
    q, k = queries_and_keys(SCORES)
    values = torch.eye(3)[None, None]  # the value of word j is the unit vector j, so the outputs are the weights
    out = attention(q, k, values, causal=True, backend=backend)
    assert_prints_as(out[0, 0], WEIGHTS)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_three_words_with_the_scores_as_a_bias(backend):
    """Zero queries and keys have zero scores, so the bias alone gives the weights."""
    nothing, values = torch.zeros(3, 3), torch.eye(3)
    out = attention(nothing, nothing, values, bias=torch.tensor(SCORES), causal=True, backend=backend)
    assert_prints_as(out, WEIGHTS)


def test_a_published_last_row_belongs_to_other_scores():
    """Some texts give 0.0900, 0.6652, 0.2448 as the weights of the scores 0.5, 2, 1.5, which is wrong.

    Softmax turns differences into ratios: the second weight must be e^(2 - 1.5) = 1.65 times the third. In that row it
    is e^1 = 2.72 times. Apart from the last digit (0.24473), these are the weights of the scores 1, 3, 2.
    """
    ratio = [row[1] / row[2] for row in last_rows([0.5, 2.0, 1.5], [1.0, 3.0, 2.0])]
    assert abs(ratio[0] - math.exp(0.5)) < 1e-5 and abs(ratio[1] - math.exp(1.0)) < 1e-5
    assert_prints_as(last_rows([1.0, 3.0, 2.0])[0], [0.0900, 0.6652, 0.2447])


def last_rows(*scores: list[float]) -> list[torch.Tensor]:
    return [attention_weights(*queries_and_keys([[0.0] * 3, [0.0] * 3, row]))[0, 0, 2] for row in scores]


# --- five words: which word attends to which


def test_mask_of_a_sentence():
    expected = [
        # The cat sat on the   <- keys; each row is a query
        [1, 0, 0, 0, 0],  # The
        [1, 1, 0, 0, 0],  # cat
        [1, 1, 1, 0, 0],  # sat
        [1, 1, 1, 1, 0],  # on
        [1, 1, 1, 1, 1],  # the
    ]
    assert torch.equal(causal_mask(5, 5), torch.tensor(expected).bool())


# --- eight heads

B, T, C, H, D = 10, 6, 512, 8, 64


@torch.no_grad()
def test_shapes_inside_eight_heads(monkeypatch):
    recorded = []

    def recording(q, k, v, **choices):
        out, weights = attention(q, k, v, **choices)
        recorded.extend([q, k, v, out])
        return out, weights

    monkeypatch.setattr("tril.model.attention.attention", recording)
    attn, x = MultiHeadAttention(C, H), torch.randn(B, T, C)
    out, weights = attn(x, need_weights=True)
    assert [part.shape for part in recorded] == 4 * [(10, 8, 6, 64)]  # 512 = 8 heads of 64
    assert out.shape == (10, 6, 512)
    assert weights.shape == (10, 8, 6, 6)  # one matrix of weights per head
    for h in range(H):  # head h is columns 64 h to 64 (h + 1) of the projection
        assert torch.equal(recorded[0][:, h], attn.q_proj(x)[..., h * D : (h + 1) * D])


@torch.no_grad()
def test_one_wide_matrix_equals_eight_narrow_ones():
    """Concat(head_1 ... head_8) W_O, head_i = softmax(Q K^T / sqrt(64)) V (Vaswani et al. 2017, section 3.2.2)."""
    x = torch.randn(B, T, C)
    w_q, w_k, w_v = torch.randn(3, H, C, D) * C**-0.5  # eight matrices (512, 64) each
    w_o = torch.randn(H * D, C) * C**-0.5

    heads = []
    for h in range(H):
        q, k, v = x @ w_q[h], x @ w_k[h], x @ w_v[h]  # (B, T, D)
        e = (q @ k.mT / 8).exp().tril()  # (B, T, T); sqrt(64) = 8
        heads.append(e / e.sum(-1, keepdim=True) @ v)  # (B, T, D)
    expected = torch.cat(heads, dim=-1) @ w_o  # (B, T, H * D) -> (B, T, C)

    attn = MultiHeadAttention(C, H)
    for layer, narrow in ((attn.q_proj, w_q), (attn.k_proj, w_k), (attn.v_proj, w_v)):
        layer.weight.copy_(torch.cat(list(narrow), dim=1).T)  # (512, 8 * 64), which nn.Linear stores transposed
    attn.o_proj.weight.copy_(w_o.T)
    assert_close(attn(x), expected)


# --- why sqrt(D)

N = 20_000  # pairs of a query and a key
FALSE_ALARM = 1e-6  # probability that a check below fails on correct code, for a random seed
Z = NormalDist().inv_cdf(1 - FALSE_ALARM / 2)  # 4.89 standard errors in both directions


def standard_error(d: int) -> float:
    """Of the mean of N values of s^2, where s = q.k / sqrt(d) and all numbers in q and k are standard normal.

    s^2 has mean 1. A product of two standard normals has fourth moment 3 * 3 = 9, an excess kurtosis of 6. A sum of d
    of them, scaled to variance 1, has an excess kurtosis of 6 / d. So s^2 has variance (3 + 6 / d) - 1. N is large
    enough for the mean to be normal.
    """
    return math.sqrt((2 + 6 / d) / N)


def pairs(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """N queries (N, 1, 1, d), each with two keys (N, 1, 2, d): a random one, and zero, whose score is 0."""
    q, k = torch.randn(2, N, 1, 1, d, dtype=torch.float64)
    return q, torch.cat([k, torch.zeros_like(k)], dim=2)


@pytest.mark.parametrize("d", [4, 16, 64, 256])
def test_products_have_standard_deviation_sqrt_d_and_scores_1(d):
    q, k = pairs(d)
    products = (q * k[:, :, :1]).sum(-1)
    assert abs(products.square().mean().item() / d - 1) < Z * standard_error(d)

    weights = attention_weights(q, k)  # (N, 1, 1, 2)
    scores = (weights[..., 0] / weights[..., 1]).log()  # e^s / e^0
    assert abs(scores.square().mean().item() - 1) < Z * standard_error(d)


@pytest.mark.parametrize("d", [4, 64])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_every_backend_scales_by_sqrt_d(backend, d):
    q, k = pairs(d)
    v = torch.eye(2, d, dtype=q.dtype).expand_as(k)  # the first two outputs are the weights of the two keys
    out = attention(q, k, v, backend=backend)
    scores = (out[..., 0] / out[..., 1]).log()
    assert abs(scores.square().mean().item() - 1) < Z * standard_error(d)
