"""The bias of the scores, against a float64 reference and a learned table, on every backend.

B batch, T queries, S keys, H query heads, D head size.
"""

import math

import pytest
import torch
from torch import nn

from tests.conftest import BACKENDS, BACKENDS_SLOW_FLEX, TRAINABLE, assert_close
from tests.model.test_attention import B, D, H, make_mask, make_qkv, reference, reference_weights, visible_by_loops
from tril.model.attention import attention, attention_weights

INF = math.inf
SIZES = [(6, 6), (3, 7), (7, 3), (1, 6)]  # (T, S)
VISIBILITY = [(False, None), (True, None), (True, 3)]  # (causal, window)
BIASES = [
    *("()", "(S,)", "(T, S)", "(T, 1)", "(H, 1, 1)", "(H, T, S)", "(1, H, 1, S)"),
    *("(B, 1, 1, S)", "(B, 1, T, S)", "(B, H, T, 1)", "(B, H, T, S)"),
]


def make_bias(kind, n_queries, n_keys, *, seed=0, dtype=torch.float32):
    """Random numbers, -inf at random places and in the whole first row."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"B": B, "H": H, "T": n_queries, "S": n_keys}
    shape = [sizes.get(c) or int(c) for c in kind.strip("()").replace(",", " ").split()]
    bias = torch.randn(shape, generator=generator, dtype=dtype)
    if len(shape) > 1:
        bias = bias.masked_fill(torch.rand(shape, generator=generator) < 0.3, -INF)
        bias.flatten(0, -2)[0] = -INF
    return bias


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("causal, window", VISIBILITY)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_output_and_gradients_match_the_reference(backend, n_queries, n_keys, causal, window, kind):
    for mask in (None, make_mask("(B, 1, T, S)", n_queries, n_keys)):
        visible = visible_by_loops(n_queries, n_keys, causal, window, mask)
        bias = make_bias(kind, n_queries, n_keys)
        inputs = [x.requires_grad_() for x in (*make_qkv(n_queries, n_keys), bias)]
        before = bias.detach().clone()
        options = {"mask": mask, "causal": causal, "window": window, "backend": backend}
        out = attention(*inputs[:3], bias=bias, **options)
        expected = reference(*inputs[:3], visible, bias)
        assert_close(out, expected)
        sees_a_key = (visible & (bias != -INF)).any(-1)
        assert (out[~sees_a_key] == 0).all() and (out[sees_a_key] != 0).any(-1).all()
        assert torch.equal(bias, before)  # the caller's tensor stays unchanged

        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, upstream)
        for actual, wanted in zip(gradients, torch.autograd.grad(expected, inputs, upstream.double()), strict=True):
            assert_close(actual, wanted)
        assert (gradients[3][bias == -INF] == 0).all()
        if bias.dim() == 4 and bias.numel() == visible.numel():
            assert (gradients[3][~visible] == 0).all()


@pytest.mark.parametrize(
    "n_queries, n_keys, causal, window, kind",
    [
        (6, 6, True, 3, "(H, T, S)"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (6, 6, False, None, "()"),
                (3, 7, True, None, "(S,)"),
                (7, 3, True, None, "(T, S)"),
                (3, 7, False, None, "(B, 1, 1, S)"),
                (1, 6, True, 3, "(B, H, T, S)"),
                (6, 6, True, None, "(H, 1, 1)"),
            ]
        ),
    ],
)
@torch.no_grad()
def test_flex_matches_the_reference(n_queries, n_keys, causal, window, kind):
    bias = make_bias(kind, n_queries, n_keys)
    for mask in (None, make_mask("(B, 1, T, S)", n_queries, n_keys)):
        q, k, v = make_qkv(n_queries, n_keys)
        out = attention(q, k, v, mask=mask, bias=bias, causal=causal, window=window, backend="flex")
        visible = visible_by_loops(n_queries, n_keys, causal, window, mask)
        assert_close(out, reference(q, k, v, visible, bias))


def test_flex_refuses_a_bias_that_needs_a_gradient_on_a_cpu():
    with pytest.raises(ValueError, match="flex.*cannot train on cpu"):
        attention(*make_qkv(4, 4), bias=torch.zeros(4, 4, requires_grad=True), backend="flex")


@pytest.mark.parametrize("kind", ["(T, S)", "(H, T, S)", "(B, 1, 1, S)"])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradcheck(backend, kind):
    qkv = make_qkv(3, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (*qkv, make_bias(kind, 3, 4, dtype=torch.float64))]
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [1, 0, 1, 1]]).bool()
    torch.autograd.gradcheck(
        lambda q, k, v, bias: attention(q, k, v, mask=mask, bias=bias, causal=True, window=3, backend=backend),
        inputs,
        fast_mode=True,
    )


@pytest.mark.parametrize("backend", TRAINABLE)
def test_rows_hidden_by_mask_and_bias_together_give_zeros_and_finite_gradients(backend):
    """The mask hides key 0, the bias each query's own position, the causal mask the rest of queries 0 and 1."""
    inputs = [x.requires_grad_() for x in (*make_qkv(4, 4), torch.zeros(4, 4))]
    bias = inputs[3].masked_fill(torch.eye(4).bool(), -INF)
    options = {"mask": torch.arange(4) > 0, "bias": bias, "causal": True, "backend": backend}
    with torch.autograd.detect_anomaly(check_nan=True):
        out = attention(*inputs[:3], **options)
        out.square().sum().backward()
    assert (out[:, :, :2] == 0).all() and (out[:, :, 2:] != 0).all()
    assert all(x.grad.isfinite().all() and (x.grad[..., :2, :] == 0).all() for x in (inputs[0], inputs[3]))
    assert_close(out[:, :, 2], inputs[2][:, :, 1].repeat_interleave(2, dim=1))  # query 2 sees key 1 only
    weights = attention(*inputs[:3], **options, need_weights=True)[1]
    assert torch.equal(weights[:, :, :3], torch.tensor([[0.0] * 4, [0.0] * 4, [0, 1, 0, 0]]).expand(B, H, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["(T, S)", "(1, T, S)", "(1, 1, T, S)"])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_an_additive_triangle_of_infinities_equals_causal(backend, shape, dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(6, 6))
    triangle = torch.full((1,) * (shape.count(",") - 1) + (6, 6), -INF).triu(1)
    out = attention(q, k, v, bias=triangle, backend=backend)
    assert_close(out, attention(q, k, v, causal=True, backend=backend), roundings=8)
    assert_close(attention(q, k, v, causal=True, bias=torch.zeros(()), backend=backend), out, roundings=8)


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_the_output_has_the_dtype_of_the_value_whatever_that_of_the_bias(backend, dtype, bias_dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(6, 6, dtype=torch.float64))
    bias = make_bias("(H, T, S)", 6, 6, dtype=torch.float64).clamp(max=1).to(bias_dtype)
    bias.requires_grad_(backend != "flex")
    out = attention(q, k, v, bias=bias, causal=True, backend=backend)
    assert out.dtype == dtype
    visible = visible_by_loops(6, 6, True, None)
    # As in test_properties: in a low precision product, bias, score, weight and output are each rounded.
    largest = (q.double() @ k.double().repeat_interleave(2, dim=1).mT / math.sqrt(D)).abs().max().item() + 3
    assert_close(out, reference(q, k, v, visible, bias), roundings=64 if dtype.itemsize > 2 else 2 * largest + 1)
    out, weights = attention(q, k, v, bias=bias, causal=True, backend=backend, need_weights=True)
    assert out.dtype == dtype and weights.dtype == torch.promote_types(dtype, torch.float32)
    if backend != "flex":
        out.sum().backward()
        assert bias.grad.dtype == bias_dtype and bias.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_large_finite_biases_do_not_become_infinite(backend, dtype):
    """Some texts mask with -1e9. A query that sees only such keys averages them; float16 has no -1e9."""
    q, v = torch.zeros(1, 1, 4, D, dtype=dtype), torch.randn(1, 1, 4, D).to(dtype)
    bias = torch.tensor([[-1e9] * 4, [0, -1e9, -1e9, -1e9], [-1e30] * 4, [-INF, -1e9, -INF, -INF]])
    out = attention(q, q, v, bias=bias, backend=backend)[0, 0]
    mean = v[0, 0].double().mean(0)
    assert_close(out, torch.stack([mean, v[0, 0, 0].double(), mean, v[0, 0, 1].double()]), roundings=4)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_a_nan_in_the_bias_stays_visible_in_the_output(backend):
    q, k, v = make_qkv(5, 5)
    bias = torch.zeros(H, 5, 5)
    bias[1, 2, 0] = math.nan
    bias[3, 0, 4] = math.nan  # masked by `causal`
    out = attention(q, k, v, bias=bias, causal=True, backend=backend)
    expected = torch.zeros(B, H, 5, dtype=torch.bool)
    expected[:, 1, 2] = True
    assert torch.equal(out.isnan().all(-1), expected) and torch.equal(out.isnan().any(-1), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_include_the_bias(backend):
    q, k, v = make_qkv(3, 7)
    bias, mask = make_bias("(H, T, S)", 3, 7), make_mask("(B, 1, T, S)", 3, 7)
    with torch.no_grad():
        _, weights = attention(q, k, v, mask=mask, bias=bias, causal=True, backend=backend, need_weights=True)
    assert_close(weights, reference_weights(q, k, visible_by_loops(3, 7, True, None, mask), bias))


def test_a_bias_of_log_multiplies_the_weights():
    """softmax(s + log c) = c exp(s) / sum(c exp(s)): a bias weights the keys, and log 0 removes one."""
    q, k, v = make_qkv(4, 4)
    factor = torch.tensor([[1.0, 2, 0, 3]] * 4)
    expected = attention_weights(q, k).double() * factor
    expected /= expected.sum(-1, keepdim=True)
    assert_close(attention(q, k, v, bias=factor.log(), need_weights=True)[1], expected)


class RelativePositions(nn.Module):
    """A learned bias per head and distance (Shaw et al. 2018; Raffel et al. 2020), here without buckets."""

    def __init__(self, length):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(H, 2 * length - 1))
        position = torch.arange(length)
        self.distance = position[:, None] - position + length - 1  # (T, T)

    def forward(self):
        return self.table[:, self.distance]  # (H, T, T)


def train(backend):
    """The losses of 30 steps that move the weights to those of a known table."""
    torch.manual_seed(0)
    q, k, v = make_qkv(6, 6)
    target, positions = RelativePositions(6), RelativePositions(6)
    nn.init.normal_(target.table)
    expected = attention(q, k, v, bias=target(), causal=True, backend="explicit").detach()
    optimizer = torch.optim.SGD(positions.parameters(), lr=20.0)
    losses = []
    for _ in range(30):
        loss = (attention(q, k, v, bias=positions(), causal=True, backend=backend) - expected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert (positions.table[:, :5] == 0).all()  # the future is masked
    return torch.stack(losses), positions.table.detach()


def test_a_learned_table_of_relative_positions_trains_equally_on_all_backends():
    losses, table = train("explicit")
    assert losses[-1] < losses[0] / 20
    for backend in TRAINABLE:
        others = train(backend)
        assert_close(others[0], losses)
        assert_close(others[1], table, roundings=640)  # 30 steps with gradients that differ by roundings


@pytest.mark.parametrize("size", [1e9, -1e9])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_a_bias_beyond_the_range_of_float16_stays_finite(backend, size):
    """Key 0 alone has the bias: a large one leaves no weight to the others, a very negative one takes its own."""
    q, k, v = make_qkv(3, 3, n_kv_heads=H, dtype=torch.float16)
    bias = torch.tensor([size, 0.0, 0.0])
    out = attention(q, k, v, bias=bias, backend=backend)
    keys = slice(0, 1) if size > 0 else slice(1, 3)
    expected = attention(q.double(), k[:, :, keys].double(), v[:, :, keys].double(), backend="explicit")
    assert_close(out, expected, roundings=4)
