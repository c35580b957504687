"""need_weights=True: the weights after dropout, of which the output is exactly the weighted sum.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import math

import pytest
import torch

from tests.conftest import BACKENDS, TRAINABLE, assert_close
from tests.model.test_attention import B, H, make_mask, make_qkv, reference_weights, visible_by_loops
from tril.model.attention import attention, attention_weights

SIZES = [(6, 6), (3, 7), (7, 3), (1, 6)]  # (T, S)


def product(weights, value):
    """weights @ value with grouped heads: (B, H, T, S), (B, G, S, D_v) -> (B, H, T, D_v)."""
    return weights @ value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("n_kv_heads, v_size", [(4, 8), (2, 3), (1, 16)])
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_is_exactly_weights_times_value(backend, dtype, n_queries, n_keys, n_kv_heads, v_size, p):
    q, k, v = make_qkv(n_queries, n_keys, n_kv_heads, dtype, v_size)
    options = {"causal": True, "dropout_p": p, "backend": backend, "need_weights": True}
    for mask in (None, make_mask("(B, H, T, S)", n_queries, n_keys)):
        out, weights = attention(q, k, v, mask=mask, **options)
        assert weights.dtype == out.dtype == dtype and weights.shape == (B, H, n_queries, n_keys)
        assert torch.equal(out, product(weights, v))
        visible = visible_by_loops(n_queries, n_keys, True, None, mask)
        assert not weights[~visible].any() and not out[~visible.any(-1)].any()
        if p == 0:
            assert_close(weights, reference_weights(q, k, visible))
            assert_close(out, attention(q, k, v, mask=mask, causal=True, backend="fused").double())


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_output_is_exactly_weights_times_value_without_heads_or_batch(p):
    q, k, v = torch.randn(5, 6, 8), torch.randn(5, 7, 8), torch.randn(5, 7, 3)
    out, weights = attention(q, k, v, causal=True, dropout_p=p, need_weights=True)
    assert torch.equal(out, weights @ v)
    out, weights = attention(q[0], k[0], v[0], causal=True, dropout_p=p, need_weights=True)
    assert torch.equal(out, (weights[None] @ v[:1])[0])
    assert_close(out, weights @ v[0], roundings=2)  # torch sums the product of two matrices in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_low_precision_the_weights_are_float32(backend, dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(6, 6))
    out, weights = attention(q, k, v, causal=True, backend=backend, need_weights=True)
    assert weights.dtype == torch.float32 and out.dtype == dtype
    assert_close(weights.sum(-1), torch.ones(B, H, 6))
    assert torch.equal(out, product(weights.to(dtype), v))
    assert_close(out, product(weights, v.float()), roundings=2)


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_visible_in_the_weights(backend, p):
    q, k, v = make_qkv(40, 40)
    plain = attention(q, k, v, causal=True, need_weights=True)[1]
    options = {"causal": True, "dropout_p": p, "backend": backend, "need_weights": True}
    out, weights = attention(q, k, v, **options)
    kept = weights != 0
    assert_close(weights[kept], plain[kept] / (1 - p))
    visible = plain != 0
    n = visible.sum().item()
    assert abs(kept.sum().item() / n - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)  # five standard deviations
    assert not kept[~visible].any()
    assert (kept[:, 0] != kept[:, 1]).any() and (kept[0] != kept[1]).any()  # each head and row draws separately

    def run(seed):
        torch.manual_seed(seed)
        return attention(q, k, v, **options)[1]

    assert torch.equal(run(0), run(0)) and not torch.equal(run(0), run(1))


def test_the_dropped_weights_are_those_of_the_output_of_the_explicit_backend():
    q, k, v = make_qkv(6, 6)
    torch.manual_seed(1)
    out = attention(q, k, v, causal=True, dropout_p=0.5, backend="explicit")
    torch.manual_seed(1)
    again, weights = attention(q, k, v, causal=True, dropout_p=0.5, backend="explicit", need_weights=True)
    assert torch.equal(out, again) and torch.equal(out, product(weights, v))


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradients_flow_through_the_weights(backend):
    """The derivative of a function of both results is that of the reference."""
    q, k, v = (x.requires_grad_() for x in make_qkv(5, 5))
    bias, mask = torch.randn(H, 5, 5, requires_grad=True), make_mask("(B, H, T, S)", 5, 5)
    out, weights = attention(q, k, v, mask=mask, bias=bias, causal=True, backend=backend, need_weights=True)
    upstream, upstream_weights = torch.randn_like(out), torch.randn_like(weights)
    gradients = torch.autograd.grad((out, weights), (q, k, v, bias), (upstream, upstream_weights))
    expected = reference_weights(q, k, visible_by_loops(5, 5, True, None, mask), bias)
    both = (product(expected, v.double()), expected)
    wanted = torch.autograd.grad(both, (q, k, v, bias), (upstream.double(), upstream_weights.double()))
    for actual, exact in zip(gradients, wanted, strict=True):
        assert_close(actual, exact)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_attention_weights_are_those_of_attention(n_kv_heads):
    q, k, v = make_qkv(5, 7, n_kv_heads)
    mask = make_mask("(B, H, T, S)", 5, 7)
    assert torch.equal(attention_weights(q, k), attention(q, k, v, need_weights=True)[1])
    assert torch.equal(attention_weights(q, k, mask), attention(q, k, v, mask=mask, need_weights=True)[1])
    assert_close(attention_weights(q[:, 0], k[:, 0]), attention_weights(q, k)[:, 0].double())
    assert_close(attention_weights(q[0, 0], k[0, 0]), attention_weights(q, k)[0, 0].double())
