"""The numbers of Sebastian Raschka's "Build a Large Language Model (From Scratch)", chapter 3 (2024).

The code of the chapter is at https://github.com/rasbt/LLMs-from-scratch, folder ch03. It makes weights with
`torch.manual_seed` and `nn.Linear` in the order q, k, v, out, as `MultiHeadAttention` does, so its numbers follow from
the seed. Sections 3.3 to 3.5: one head. T = 6 words, model width 3, head size 2.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close
from tests.model.printed import INPUTS, assert_prints_as
from tril.model.attention import MultiHeadAttention, attention, attention_weights
from tril.model.masks import causal_mask

ONE_DIGIT = 1.5e-4  # torch's random numbers are the same everywhere, its sums may round differently
X = torch.tensor(INPUTS)

# --- 3.3: attention without weights; queries, keys and values are the inputs, and nothing is scaled

SCORES = [
    [0.9995, 0.9544, 0.9422, 0.4753, 0.4576, 0.6310],
    [0.9544, 1.4950, 1.4754, 0.8434, 0.7070, 1.0865],
    [0.9422, 1.4754, 1.4570, 0.8296, 0.7154, 1.0605],
    [0.4753, 0.8434, 0.8296, 0.4937, 0.3474, 0.6565],
    [0.4576, 0.7070, 0.7154, 0.3474, 0.6654, 0.2935],
    [0.6310, 1.0865, 1.0605, 0.6565, 0.2935, 0.9450],
]
WEIGHTS = [
    [0.2098, 0.2006, 0.1981, 0.1242, 0.1220, 0.1452],
    [0.1385, 0.2379, 0.2333, 0.1240, 0.1082, 0.1581],
    [0.1390, 0.2369, 0.2326, 0.1242, 0.1108, 0.1565],
    [0.1435, 0.2074, 0.2046, 0.1462, 0.1263, 0.1720],
    [0.1526, 0.1958, 0.1975, 0.1367, 0.1879, 0.1295],
    [0.1385, 0.2184, 0.2128, 0.1420, 0.0988, 0.1896],
]
CONTEXTS = [
    [0.4421, 0.5931, 0.5790],
    [0.4419, 0.6515, 0.5683],
    [0.4431, 0.6496, 0.5671],
    [0.4304, 0.6298, 0.5510],
    [0.4671, 0.5910, 0.5266],
    [0.4177, 0.6503, 0.5645],
]
SHARES = [0.1455, 0.2278, 0.2249, 0.1285, 0.1077, 0.1656]  # the scores of the second word divided by their sum


def unscaled(query: Tensor) -> Tensor:
    """A query whose scores are plain dot products: `attention` divides by sqrt(D)."""
    return query * math.sqrt(query.shape[-1])


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_contexts_without_weight_matrices(backend):
    context = attention(unscaled(X), X, X, backend=backend)
    assert_prints_as(context, CONTEXTS)


def test_scores_and_weights_without_weight_matrices():
    assert_prints_as(X @ X.T, SCORES)
    _, weights = attention(unscaled(X), X, X, need_weights=True)
    assert_prints_as(weights, WEIGHTS)
    assert_close(weights.sum(-1), torch.ones(6))
    zero = torch.zeros_like(X)
    _, same = attention(zero, X, X, bias=torch.tensor(SCORES), need_weights=True)  # the printed scores, as a bias
    assert_prints_as(same, WEIGHTS, tolerance=ONE_DIGIT)


def test_one_query_at_a_time():
    context, weights = attention(unscaled(X[1:2]), X, X, need_weights=True)
    assert_prints_as(weights[0], WEIGHTS[1])
    assert_prints_as(context[0], CONTEXTS[1])


def test_dividing_scores_by_their_sum_is_not_softmax():
    """The first normalization of the text; it fails for scores of both signs, and softmax replaces it."""
    scores = torch.tensor(SCORES[1])
    assert_prints_as(scores / scores.sum(), SHARES)
    assert (scores / scores.sum() - torch.tensor(WEIGHTS[1])).abs().max() > 0.01
    assert_prints_as(scores.softmax(-1), WEIGHTS[1])


# --- 3.4: weight matrices, scaled scores

QUERY_2 = [0.4306, 1.4551]  # seed 123, torch.rand(3, 2) for q, k and v
SCORES_2 = [1.2705, 1.8524, 1.8111, 1.0795, 0.5577, 1.5440]
WEIGHTS_2 = [0.1500, 0.2264, 0.2199, 0.1311, 0.0906, 0.1820]
UNIFORM = [[0.2996, 0.8053], [0.3061, 0.8210], [0.3058, 0.8203], [0.2948, 0.7939], [0.2927, 0.7891], [0.2990, 0.8040]]
LINEAR_789 = [
    [-0.0739, 0.0713],
    [-0.0748, 0.0703],
    [-0.0749, 0.0702],
    [-0.0760, 0.0685],
    [-0.0763, 0.0679],
    [-0.0754, 0.0693],
]
LINEAR_123 = [  # exercise 3.1
    [-0.5337, -0.1051],
    [-0.5323, -0.1080],
    [-0.5323, -0.1079],
    [-0.5297, -0.1076],
    [-0.5311, -0.1066],
    [-0.5299, -0.1081],
]


def single_head(*, seed: int, causal: bool = False, size: int = 2) -> MultiHeadAttention:
    """One head without output projection, `nn.Linear` in the order q, k, v."""
    torch.manual_seed(seed)
    return MultiHeadAttention(3, 1, head_dim=size, causal=causal, out_proj=False)


def random_matrices() -> list[Tensor]:
    torch.manual_seed(123)
    return [torch.rand(3, 2) for _ in range(3)]


def test_the_second_word_with_weight_matrices():
    w_q, w_k, w_v = random_matrices()
    query, keys, values = X[1:2] @ w_q, X @ w_k, X @ w_v
    assert keys.shape == values.shape == (6, 2)
    assert_prints_as(query[0], QUERY_2)
    assert_prints_as((query @ keys.T)[0], SCORES_2)
    context, weights = attention(query, keys, values, need_weights=True)
    assert_prints_as(weights[0], WEIGHTS_2)
    assert_prints_as(context[0], UNIFORM[1])


@torch.no_grad()
def test_a_module_with_given_matrices():
    attn = single_head(seed=0)
    for layer, matrix in zip((attn.q_proj, attn.k_proj, attn.v_proj), random_matrices(), strict=True):
        layer.weight.copy_(matrix.T)  # nn.Linear stores the transposed matrix
    assert_prints_as(attn(X[None])[0], UNIFORM)


@pytest.mark.parametrize("seed, printed", [(789, LINEAR_789), (123, LINEAR_123)])
@torch.no_grad()
def test_a_module_with_the_weights_of_a_seed(seed, printed):
    assert_prints_as(single_head(seed=seed)(X[None])[0], printed, tolerance=ONE_DIGIT)


# --- 3.5: the causal mask

WEIGHTS_789 = [
    [0.1921, 0.1646, 0.1652, 0.1550, 0.1721, 0.1510],
    [0.2041, 0.1659, 0.1662, 0.1496, 0.1665, 0.1477],
    [0.2036, 0.1659, 0.1662, 0.1498, 0.1664, 0.1480],
    [0.1869, 0.1667, 0.1668, 0.1571, 0.1661, 0.1564],
    [0.1830, 0.1669, 0.1670, 0.1588, 0.1658, 0.1585],
    [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
]
CAUSAL_WEIGHTS_789 = [
    [1.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.5517, 0.4483, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.3800, 0.3097, 0.3103, 0.0000, 0.0000, 0.0000],
    [0.2758, 0.2460, 0.2462, 0.2319, 0.0000, 0.0000],
    [0.2175, 0.1983, 0.1984, 0.1888, 0.1971, 0.0000],
    [0.1935, 0.1663, 0.1666, 0.1542, 0.1666, 0.1529],
]
LOWER_SCORES_789 = [  # before the scaling; the upper triangle is -inf
    [0.2899],
    [0.4656, 0.1723],
    [0.4594, 0.1703, 0.1731],
    [0.2642, 0.1024, 0.1036, 0.0186],
    [0.2183, 0.0874, 0.0882, 0.0177, 0.0786],
    [0.3408, 0.1270, 0.1290, 0.0198, 0.1290, 0.0078],
]
DROPPED_789 = [  # seed 123, p = 0.5
    [2.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.0000, 0.0000, 0.0000, 0.0000, 0.0000, 0.0000],
    [0.7599, 0.6194, 0.6206, 0.0000, 0.0000, 0.0000],
    [0.0000, 0.4921, 0.4925, 0.0000, 0.0000, 0.0000],
    [0.0000, 0.3966, 0.0000, 0.3775, 0.0000, 0.0000],
    [0.0000, 0.3327, 0.3331, 0.3084, 0.3331, 0.0000],
]


@torch.no_grad()
def test_masked_scores_with_minus_infinity():
    attn = single_head(seed=789)
    masked = (attn.q_proj(X) @ attn.k_proj(X).T).masked_fill(~causal_mask(6, 6), -math.inf)
    printed = [[*row, *[-math.inf] * (6 - len(row))] for row in LOWER_SCORES_789]
    assert_prints_as(masked, printed)
    bias = torch.tensor(printed) / math.sqrt(2)  # the printed scores, hidden keys included, as a bias of zero scores
    _, weights = attention(torch.zeros(6, 3), X, X, bias=bias, need_weights=True)
    assert_prints_as(weights, CAUSAL_WEIGHTS_789, tolerance=ONE_DIGIT)


@torch.no_grad()
def test_weights_before_and_after_the_causal_mask():
    attn = single_head(seed=789)
    _, weights = attn(X[None], need_weights=True)
    assert weights.shape == (1, 1, 6, 6)
    assert_prints_as(weights[0, 0], WEIGHTS_789, tolerance=ONE_DIGIT)
    attn.causal = True
    _, weights = attn(X[None], need_weights=True)
    assert_prints_as(weights[0, 0], CAUSAL_WEIGHTS_789, tolerance=ONE_DIGIT)
    assert weights.triu(1).count_nonzero() == 0  # exactly 0 for the future


@torch.no_grad()
def test_zeroing_weights_and_normalizing_again_equals_masking_scores():
    attn = single_head(seed=789)
    weights = attention_weights(attn.q_proj(X)[None, None], attn.k_proj(X)[None, None])[0, 0]
    lower = weights * torch.ones(6, 6).tril()
    assert_prints_as(lower, torch.tensor(WEIGHTS_789).tril().tolist(), tolerance=ONE_DIGIT)
    assert lower[1].sum() < 0.5  # without the second normalization the row does not sum to 1
    q, k = attn.q_proj(X), attn.k_proj(X)
    _, masked = attention(q, k, X, causal=True, need_weights=True)
    assert_close(lower / lower.sum(-1, keepdim=True), masked)


@pytest.mark.parametrize("backend", TRAINABLE)
@torch.no_grad()
def test_dropped_weights_follow_torchs_dropout(backend):
    attn = single_head(seed=789)
    q, k, values = attn.q_proj(X), attn.k_proj(X), torch.eye(6)
    torch.manual_seed(123)
    kept = nn.Dropout(0.5)(torch.ones(6, 6))
    torch.manual_seed(123)
    out, weights = attention(q, k, values, causal=True, dropout_p=0.5, backend=backend, need_weights=True)
    assert torch.equal(out, weights)  # the values are the unit vectors, so the output is the weights after dropout
    assert_prints_as(weights, (torch.tensor(CAUSAL_WEIGHTS_789) * kept).tolist(), tolerance=3e-4)
    if kept[0].tolist() == [2, 2, 0, 2, 2, 0]:  # the text: dropout differs between operating systems
        assert_prints_as(weights, DROPPED_789, tolerance=ONE_DIGIT)
