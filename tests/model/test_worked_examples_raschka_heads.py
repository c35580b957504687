"""Several heads in Sebastian Raschka's "Build a Large Language Model (From Scratch)", section 3.6 and exercises (2024).

The code of the chapter is at https://github.com/rasbt/LLMs-from-scratch, folder ch03. T = 6 words, model width 3.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import BACKENDS_SLOW_FLEX, assert_close
from tests.model.printed import INPUTS, assert_prints_as
from tril.model.attention import MultiHeadAttention, attention, attention_weights
from tril.model.masks import causal_mask

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ONE_DIGIT = 1.5e-4  # torch's random numbers are the same everywhere, its sums may round differently
BATCH = torch.tensor([INPUTS, INPUTS])  # the same text twice, (2, 6, 3)

TWO_SINGLE_HEADS = [
    [-0.4519, 0.2216, 0.4772, 0.1063],
    [-0.5874, 0.0058, 0.5891, 0.3257],
    [-0.6300, -0.0632, 0.6202, 0.3860],
    [-0.5675, -0.0843, 0.5478, 0.3589],
    [-0.5526, -0.0981, 0.5321, 0.3428],
    [-0.5299, -0.1081, 0.5077, 0.3493],
]
WIDTH_2 = [[0.3190, 0.4858], [0.2943, 0.3897], [0.2856, 0.3593], [0.2693, 0.3873], [0.2639, 0.3928], [0.2575, 0.4028]]
WIDTH_4 = [  # the module of the text with d_out=4 (Tongji-Large-Scale-Research-Group/Awesome-Cloud, docs/issue-18.md)
    [0.1184, 0.3120, -0.0847, -0.5774],
    [0.0178, 0.3221, -0.0763, -0.4225],
    [-0.0147, 0.3259, -0.0734, -0.3721],
    [-0.0116, 0.3138, -0.0708, -0.3624],
    [-0.0117, 0.2973, -0.0698, -0.3543],
    [-0.0132, 0.2990, -0.0689, -0.3490],
]
WIDTH_4_CONCATENATED = [  # a reader's solution of the same module without the output projection
    [-0.3132, -0.2272, 0.4772, 0.1063],
    [-0.2308, 0.0329, 0.5764, 0.3007],
    [-0.2059, 0.1190, 0.6097, 0.3654],
    [-0.1642, 0.1340, 0.5431, 0.3503],
    [-0.1689, 0.1794, 0.5296, 0.3389],
    [-0.1407, 0.1699, 0.5040, 0.3403],
]
WRONG_AXIS = [  # printed as the solution of exercise 3.2, two heads of size 1
    [-9.1476e-02, 3.4164e-02],
    [-2.6796e-01, -1.3427e-03],
    [-4.8421e-01, -4.8909e-02],
    [-6.4808e-01, -1.0625e-01],
    [-8.8380e-01, -1.7140e-01],
    [-1.4744e00, -3.4327e-01],
]
HEADS = [  # B = 1, H = 2, T = 3, D = 4
    [[0.2745, 0.6584, 0.2775, 0.8573], [0.8993, 0.0390, 0.9268, 0.7388], [0.7179, 0.7058, 0.9156, 0.4340]],
    [[0.0772, 0.3565, 0.1479, 0.5331], [0.4066, 0.2318, 0.4545, 0.9737], [0.4606, 0.5159, 0.4220, 0.5786]],
]
HEADS_SCORES = [
    [[1.3208, 1.1631, 1.2879], [1.1631, 2.2150, 1.8424], [1.2879, 1.8424, 2.0402]],
    [[0.4391, 0.7003, 0.5903], [0.7003, 1.3737, 1.0620], [0.5903, 1.0620, 0.9912]],
]


def single_heads(size: int, **choices) -> list[MultiHeadAttention]:
    """Two modules of one head without output projection, created in the order q, k, v of head 0, then of head 1."""
    torch.manual_seed(123)
    return [MultiHeadAttention(3, 1, head_dim=size, out_proj=False, **choices) for _ in range(2)]


def one_module(width: int, **choices) -> MultiHeadAttention:
    """One module of two heads that together have `width`; a bias in the output projection alone."""
    torch.manual_seed(123)
    return MultiHeadAttention(3, 2, head_dim=width // 2, out_dim=width, out_bias=True, **choices)


def assert_both_rows_print_as(out: Tensor, printed) -> None:
    assert out.shape == (2, 6, len(printed[0]))
    for row in out:
        assert_prints_as(row, printed, tolerance=ONE_DIGIT)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_one_causal_head(backend):
    head = single_heads(2, backend=backend)[0]
    assert_both_rows_print_as(head(BATCH), [row[:2] for row in TWO_SINGLE_HEADS])


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_two_single_heads_side_by_side(backend):
    out = torch.cat([head(BATCH) for head in single_heads(2, backend=backend)], dim=-1)
    assert_both_rows_print_as(out, TWO_SINGLE_HEADS)


@torch.no_grad()
def test_one_module_equals_the_two_single_heads():
    """The matrices of the heads, one below the other, are those of a module with two heads."""
    heads = single_heads(2)
    attn = MultiHeadAttention(3, 2, head_dim=2, out_proj=False)
    for name in PROJECTIONS:
        getattr(attn, name).weight.copy_(torch.cat([getattr(head, name).weight for head in heads]))
    assert_both_rows_print_as(attn(BATCH), TWO_SINGLE_HEADS)


@pytest.mark.parametrize("width, printed", [(2, WIDTH_2), (4, WIDTH_4)])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_one_module_with_an_output_projection(backend, width, printed):
    assert_both_rows_print_as(one_module(width, backend=backend)(BATCH), printed)


@torch.no_grad()
def test_the_same_module_with_copied_weights():
    torch.manual_seed(123)
    layers = [nn.Linear(3, 4, bias=False) for _ in range(3)] + [nn.Linear(4, 4)]
    attn = MultiHeadAttention(3, 2, head_dim=2, out_dim=4, out_bias=True)
    for layer, made in zip((attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj), layers, strict=True):
        layer.load_state_dict(made.state_dict())
    assert_both_rows_print_as(attn(BATCH), WIDTH_4)


@torch.no_grad()
def test_one_module_without_the_output_projection():
    torch.manual_seed(123)
    attn = MultiHeadAttention(3, 2, head_dim=2, out_proj=False)
    assert isinstance(attn.o_proj, nn.Identity)
    assert_both_rows_print_as(attn(BATCH), WIDTH_4_CONCATENATED)
    full = one_module(4)  # the same q, k and v, because the output projection is created last
    assert_both_rows_print_as(full.o_proj(attn(BATCH)), WIDTH_4)


@torch.no_grad()
def test_the_exercise_that_normalizes_over_queries():
    """The solution printed for exercise 3.2 is a softmax along the wrong axis: over the queries, not over the keys.

    A row of weights that sums to 1 gives a mean of the values. The last printed row, -1.4744, is outside their range.
    """
    heads = single_heads(1)
    q, k, v = (torch.stack([getattr(head, name)(BATCH[0]) for head in heads]) for name in PROJECTIONS)  # (2, T, 1)
    scores = (q @ k.mT).masked_fill(~causal_mask(6, 6), float("-inf"))  # (2, T, S)
    over_queries = scores.softmax(dim=1) @ v
    assert_prints_as(over_queries[..., 0].T, WRONG_AXIS, tolerance=ONE_DIGIT)

    out = torch.cat([head(BATCH[:1]) for head in heads], dim=-1)[0]
    assert (out.amin(0) >= v[..., 0].amin(1)).all() and (out.amax(0) <= v[..., 0].amax(1)).all()
    assert torch.tensor(WRONG_AXIS)[-1, 0] < v[0].min()
    assert (out - torch.tensor(WRONG_AXIS)).abs().max() > 0.8


def test_dot_products_of_each_head():
    a = torch.tensor([HEADS])  # (1, 2, 3, 4)
    assert_prints_as(a @ a.mT, [HEADS_SCORES])
    expected = torch.tensor(HEADS_SCORES).softmax(-1)
    assert_prints_as(attention_weights(2 * a, a)[0], expected.tolist(), tolerance=ONE_DIGIT)  # sqrt(4) = 2
    for h in range(2):  # each head separately, without the dimension of heads
        _, weights = attention(2 * a[0, h], a[0, h], a[0, h], need_weights=True)
        assert_prints_as(weights, expected[h].tolist(), tolerance=ONE_DIGIT)


def test_parameters_of_gpt2s_attention():
    """Exercise 3.3: width 768, 12 heads, 2.36 million parameters."""
    assert sum(p.numel() for p in MultiHeadAttention(768, 12, out_bias=True).parameters()) == 2_360_064


@torch.no_grad()
def test_shapes_of_the_summary():
    """Eight texts of four tokens, width 256, two heads, as modules of one head or as one module."""
    x = torch.randn(8, 4, 256)
    heads = [MultiHeadAttention(256, 1, head_dim=128, out_proj=False) for _ in range(2)]
    assert torch.cat([head(x) for head in heads], dim=-1).shape == (8, 4, 256)
    assert MultiHeadAttention(256, 2, out_bias=True)(x).shape == (8, 4, 256)


@torch.no_grad()
def test_a_shorter_input_uses_the_corner_of_the_mask():
    """The text cuts its mask buffer to the number of tokens; causal outputs of a prefix are those of the whole text."""
    attn = one_module(4)
    for n in range(1, 7):
        assert_close(attn(BATCH[:, :n]), attn(BATCH)[:, :n])
