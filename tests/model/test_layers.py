"""Norms, FFNs and position schemes against their formulas.

B batch, T tokens, H heads, D head size, C width.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import assert_close, randomize, tiny_gpt
from tril.model.layers import ACTIVATIONS, MLP, make_norm
from tril.model.positions import alibi_bias, alibi_slopes, rope_table, rotate

C = 12


@pytest.mark.parametrize("eps", [None, 0.1])
@pytest.mark.parametrize(("kind", "bias"), [("rmsnorm", False), ("layernorm", False), ("layernorm", True)])
def test_a_norm_equals_its_formula(kind, bias, eps):
    norm, x = randomize(make_norm(kind, C, eps=eps, bias=bias)), 1e-3 * torch.randn(3, 5, C)  # so small that eps counts
    eps = eps or (1e-5 if kind == "layernorm" else torch.finfo(torch.float32).eps)
    wide = x.double() - (x.double().mean(-1, keepdim=True) if kind == "layernorm" else 0)
    expected = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()
    assert_close(norm(x), expected * norm.weight.double() + (norm.bias.double() if bias else 0))
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x.bfloat16()).dtype == torch.bfloat16


FORMULAS = {
    "relu": lambda x, gate: x.clamp(min=0),
    "gelu": lambda x, gate: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x, gate: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "relu2": lambda x, gate: x.clamp(min=0) ** 2,
    "swiglu": lambda x, gate: gate * torch.sigmoid(gate) * x,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_ffn_equals_its_formula(kind):
    mlp, x = randomize(MLP(C, 30, kind=kind, bias=True, dropout=0.0)).double(), torch.randn(2, 3, C).double()
    x.requires_grad_()
    gate = None if mlp.gate is None else F.linear(x, mlp.gate.weight, mlp.gate.bias)
    hidden = FORMULAS[kind](F.linear(x, mlp.up.weight, mlp.up.bias), gate)
    out, expected, grad = mlp(x), F.linear(hidden, mlp.down.weight, mlp.down.bias), torch.randn(2, 3, C).double()
    assert_close(out, expected)
    assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (out, expected)))


def test_angles_of_rotation_are_those_of_float64_and_scores_depend_on_the_distance():
    cos, sin = rope_table(9, 8)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 9, 8)  # the same vector at every position
    scores = (rotate(q, cos, sin) @ rotate(k, cos, sin).mT)[0, 0]
    assert all((scores.diagonal(d) - scores.diagonal(d)[0]).abs().max() < 1e-5 for d in range(-8, 9))
    cos, _ = rope_table(100_001, 6)
    expected = [math.cos(100_000 * 10_000 ** (-i / 3)) for i in range(3)]  # angles in float32 are wrong by 0.0005
    assert_close(cos[-1], torch.tensor(expected), roundings=1)


def test_alibi_is_that_of_the_paper():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    expected = [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]  # those of 4 heads, then every second one of 8
    assert alibi_slopes(6).tolist() == expected and alibi_slopes(0).tolist() == []
    bias = alibi_bias(torch.tensor([0.5]), 2, 4)  # the last query is at the position of the last key
    assert bias.tolist() == [[[-1.0, -0.5, 0.0, -0.5], [-1.5, -1.0, -0.5, 0.0]]]
    assert torch.equal(alibi_bias(torch.tensor([0.5]), 2, 4, start=torch.tensor([2])), bias)


@pytest.mark.parametrize(("pos", "n_tables"), [("rope", 2), ("alibi", 1), ("learned", 0), ("none", 0)])
def test_position_tables_are_in_no_checkpoint_and_keep_float32_where_the_weights_are_cast(pos, n_tables):
    model = tiny_gpt(pos=pos)
    tables = [table.clone() for table in model.pos_embed.buffers()]
    assert len(tables) == n_tables and len(model.pos_embed.state_dict()) == (pos == "learned")
    model.to(torch.bfloat16)
    torch.testing.assert_close([*model.pos_embed.buffers()], tables, rtol=0, atol=0)
