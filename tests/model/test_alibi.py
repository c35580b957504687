"""ALiBi against the slopes that Press et al. 2022 print, their published code, and a GPT as formulas in float64.

B batch, H heads, T queries, S keys, D head size, V vocabulary.
"""

import math

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, tiny_gpt
from tril.model.alibi import alibi_bias, alibi_slopes

B, T, V = 2, 9, 31  # V is that of tiny_gpt
EPS = 1e-5

# --- slopes


def published_slopes(n):
    """`get_slopes` of the authors' code (attention_with_linear_biases, fairseq/models/transformer.py)."""

    def of_a_power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n).is_integer():
        return of_a_power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return of_a_power_of_2(closest) + published_slopes(2 * closest)[0::2][: n - closest]


EIGHT = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.parametrize(
    "slopes",
    [
        EIGHT,  # printed in section 3 of the paper
        [2 ** (-i / 2) for i in range(1, 17)],  # 16 heads, as printed there: 1 / 2^0.5, 1 / 2^1, ... 1 / 2^8
        [1 / 256],
        [1 / 16, 1 / 256],
        [1 / 4, 1 / 16, 1 / 64, 1 / 256],
        [1 / 16, 1 / 256, 1 / 4],  # 3 heads: those of 2, and the first of 4
        [*EIGHT, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],  # 12 heads: those of 8, and every second one of 16
    ],
    ids=len,
)
def test_slopes_equal_literal_values(slopes):
    assert_close(alibi_slopes(len(slopes)), torch.tensor(slopes), roundings=1)


@pytest.mark.parametrize("n_heads", range(1, 41))
def test_slopes_equal_those_of_the_published_code(n_heads):
    slopes = alibi_slopes(n_heads)
    assert slopes.dtype == torch.float32 and slopes.shape == (n_heads,)
    torch.testing.assert_close(slopes, torch.tensor(published_slopes(n_heads)), rtol=1e-6, atol=0)


# --- bias


def test_the_bias_equals_a_literal_array():
    bias = alibi_bias(torch.tensor([0.5, 2.0]), 3, 3)
    distance = torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]])
    assert torch.equal(bias, torch.stack([-0.5 * distance, -2.0 * distance]))


def test_the_last_query_is_at_the_position_of_the_last_key_or_at_start():
    slopes = torch.tensor([1.0])
    rows = torch.tensor([[[-3.0, -2, -1, 0, -1], [-4, -3, -2, -1, 0]]])
    assert torch.equal(alibi_bias(slopes, 2, 5), rows)
    assert torch.equal(alibi_bias(slopes, 2, 5, start=torch.tensor([3])), rows)
    assert torch.equal(alibi_bias(slopes, 1, 5, start=torch.tensor([1])), torch.tensor([[[-1.0, 0, -1, -2, -3]]]))


# --- the model


def alibi_gpt(weights, ids, n_layers, n_heads, groups, window=None):
    """The logits of a GPT with rmsnorm, squared relu and ALiBi, as formulas on a dict of float64 tensors.

    Written position by position: each query has the keys before it, and its scores the slope times the distance.
    """

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weights[name]

    x = weights["embed.weight"][ids]
    for layer in range(n_layers):
        block = f"blocks.{layer}."
        h = norm(x, block + "norm1.weight")
        q, k, v = (h @ weights[f"{block}attn.{part}_proj.weight"].mT for part in "qkv")
        q, k, v = q.unflatten(-1, (n_heads, -1)), k.unflatten(-1, (groups, -1)), v.unflatten(-1, (groups, -1))
        heads = torch.empty_like(q)  # (B, T, H, D)
        for t in range(ids.shape[1]):
            first = 0 if window is None else max(0, t - window + 1)
            for head, slope in enumerate(published_slopes(n_heads)):
                group = head * groups // n_heads
                scores = (k[:, first : t + 1, group] @ q[:, t, head, :, None])[..., 0] / math.sqrt(
                    q.shape[-1]
                )  # (B, S)
                scores = scores - slope * (t - torch.arange(first, t + 1))
                heads[:, t, head] = (scores.softmax(-1)[:, None] @ v[:, first : t + 1, group])[:, 0]
        x = x + heads.flatten(2) @ weights[block + "attn.o_proj.weight"].mT
        h = norm(x, block + "norm2.weight")
        x = x + (h @ weights[block + "mlp.up.weight"].mT).clamp(min=0) ** 2 @ weights[block + "mlp.down.weight"].mT
    return norm(x, "norm.weight") @ weights["head.weight"].mT


def make_gpt(**choices):
    return tiny_gpt(**{"pos": "alibi", "qk_norm": "none", "norm_eps": EPS} | choices)


SHAPES = [
    {"n_heads": 4},
    {"n_heads": 8, "n_kv_heads": 2},
    {"n_heads": 6, "head_dim": 5},  # an odd head size, and a number of heads that is no power of 2
    {"n_heads": 12, "head_dim": 4, "n_kv_heads": 4, "window": 4},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_logits_equal_the_formulas(backend, shape):
    model, ids = make_gpt(backend=backend, **shape), torch.randint(V, (B, T))
    weights = {name: x.double() for name, x in model.state_dict().items()}
    options = {"n_heads": shape["n_heads"], "groups": model.config.kv_heads, "window": model.config.window}
    expected = alibi_gpt(weights, ids, n_layers=2, **options)
    assert_close(model(ids), expected)
    without = make_gpt(pos="none", **shape)
    without.load_state_dict(model.state_dict())
    assert (without(ids) - expected).abs().max() > 0.05
    exact = math.log2(shape["n_heads"]).is_integer()  # else the slopes are rounded to float32
    assert_close(model.double()(ids), expected, roundings=64 if exact else 1e-6 / torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_equal_those_of_the_formulas(backend):
    model, ids = make_gpt(n_kv_heads=2, backend=backend), torch.randint(V, (B, T))
    weights = {name: x.detach().double().requires_grad_() for name, x in model.named_parameters()}
    tied = weights | {"head.weight": weights["embed.weight"]}
    alibi_gpt(tied, ids, n_layers=2, n_heads=4, groups=2).logsumexp(-1).mean().backward()
    model(ids).logsumexp(-1).mean().backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, weights[name].grad)


@torch.no_grad()
def test_positions_have_no_effect():
    """Distances are counted in columns."""
    model, ids = tiny_gpt(pos="alibi"), torch.randint(V, (B, T))
    assert torch.equal(model(ids, positions=torch.randint(12, (B, T))), model(ids))


@torch.no_grad()
def test_autocast_to_bfloat16_is_close_to_float32():
    model, ids = tiny_gpt(pos="alibi"), torch.randint(V, (B, T))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
    assert out.dtype == torch.bfloat16
    assert_close(out, model(ids), roundings=4)


def test_the_slopes_follow_from_the_config():
    """They are no parameters, are not saved, and are on the device of the model."""
    model = tiny_gpt(pos="alibi")
    assert not any("slopes" in name for name in (*model.state_dict(), *dict(model.named_parameters())))
    assert model.n_parameters() == tiny_gpt(pos="none").n_parameters()
    with torch.device("meta"):
        meta = tiny_gpt(pos="alibi")
        assert meta.alibi_slopes.device.type == "meta" and meta(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, V)
