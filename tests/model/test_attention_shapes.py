"""Leading dimensions, and values of another size than keys: `attention` against a float64 reference.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value.
"""

import pytest
import torch
import torch.nn.functional as F

import tril.model.attention_fused
from tests.conftest import BACKENDS, BACKENDS_SLOW_FLEX, TRAINABLE, assert_close
from tests.model.test_attention import (
    B,
    D,
    H,
    assert_output_and_gradients,
    make_mask,
    make_qkv,
    reference,
    reference_weights,
    visible_by_loops,
)
from tril.model.attention import attention
from tril.model.masks import causal_mask

INF = float("inf")
SIZES = [(6, 6), (3, 7), (7, 3), (1, 6)]  # (T, S)
VISIBILITY = [(False, None), (True, None), (True, 3)]  # (causal, window)
V_SIZES = [1, 3, 2 * D]  # D_v, where D is 8
MASKS = {3: ["()", "(S,)", "(T, 1)", "(T, S)", "(1, T, S)", "(B, 1, S)", "(B, T, 1)", "(B, T, S)"]}
MASKS[2] = [kind for kind in MASKS[3] if "B" not in kind and kind != "(1, T, S)"]


def without_heads(n_dims, n_queries, n_keys, v_size=D):
    """q, k, v of (T, D) or (B, T, D)."""
    sizes = ((n_queries, D), (n_keys, D), (n_keys, v_size))
    return [torch.randn(*(B,) * (n_dims - 2), *size, requires_grad=True) for size in sizes]


def with_one_head(x, n_dims):
    """(T, D) or (B, T, D) -> (B, 1, T, D); of a smaller mask or bias too, with B = 1 where it has none."""
    x = x[(None,) * (n_dims - x.dim())]
    return x[None, None] if n_dims == 2 else x[:, None]


@pytest.mark.parametrize("causal, window", VISIBILITY)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_without_heads_or_batch_the_numbers_are_those_of_one_head(backend, n_dims, n_queries, n_keys, causal, window):
    for kind in ("no mask", *MASKS[n_dims]):
        inputs = without_heads(n_dims, n_queries, n_keys)
        mask = make_mask(kind, n_queries, n_keys) if kind != "()" else torch.tensor(True)
        bias = None if mask is None else torch.randn(mask.shape).masked_fill(torch.rand(mask.shape) < 0.2, -INF)
        out = attention(*inputs, mask=mask, bias=bias, causal=causal, window=window, backend=backend)

        q, k, v, *given = (x if x is None else with_one_head(x, n_dims) for x in (*inputs, mask, bias))
        visible = visible_by_loops(n_queries, n_keys, causal, window)[: len(q), :1]
        visible = visible if mask is None else visible & given[0]
        expected = reference(q, k, v, visible, given[1])
        assert out.shape == inputs[0].shape
        assert_close(with_one_head(out, n_dims), expected)
        upstream = torch.randn_like(out)
        gradients = torch.autograd.grad(out, inputs, upstream)
        wanted = torch.autograd.grad(expected, inputs, with_one_head(upstream, n_dims).double())
        for actual, exact in zip(gradients, wanted, strict=True):
            assert_close(actual, exact)

        again, weights = attention(
            *inputs, mask=mask, bias=bias, causal=causal, window=window, backend=backend, need_weights=True
        )
        assert weights.shape == (*out.shape[:-1], n_keys)
        assert_close(again, out.double())
        assert_close(with_one_head(weights, n_dims), reference_weights(q, k, visible, given[1]))


@pytest.mark.slow
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
@pytest.mark.parametrize("n_dims", [2, 3])
@torch.no_grad()
def test_without_heads_or_batch_flex_computes_the_same(n_dims, n_queries, n_keys):
    for mask in (None, make_mask("(T, S)", n_queries, n_keys)):
        inputs = without_heads(n_dims, n_queries, n_keys, v_size=3)
        out = attention(*inputs, mask=mask, causal=True, backend="flex")
        assert_close(out, attention(*inputs, mask=mask, causal=True, backend="explicit").double())


@pytest.mark.parametrize("n_dims", [2, 3])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_with_more_dimensions_than_the_scores_are_refused_in_one_line(name, n_dims):
    q, k, v = without_heads(n_dims, 6, 6)
    for shape in [(1,) * (n_dims - 1) + (6, 6), (B, 5, 6), (6, 5)]:
        wrong = {"mask": torch.ones(shape, dtype=torch.bool), "bias": torch.ones(shape)}[name]
        with pytest.raises(ValueError) as error:
            attention(q, k, v, **{name: wrong})
        letters = {2: "(T, S) = (6, 6)", 3: "(B, T, S) = (2, 6, 6)"}[n_dims]
        assert f"{name} of shape {shape} does not broadcast to {letters}" in str(error.value)
        assert "\n" not in str(error.value)


# --- values of another size


@pytest.mark.parametrize("v_size", V_SIZES)
@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_values_of_another_size_match_the_reference(backend, n_queries, n_keys, n_kv_heads, v_size):
    choices = [(False, None, "no mask"), (True, None, "no mask"), (True, 2, "no mask"), (True, None, "(B, 1, T, S)")]
    for causal, window, mask_kind in choices:
        mask = make_mask(mask_kind, n_queries, n_keys)
        visible = visible_by_loops(n_queries, n_keys, causal, window, mask)
        qkv = [x.requires_grad_() for x in make_qkv(n_queries, n_keys, n_kv_heads, v_size=v_size)]
        out = attention(*qkv, mask=mask, causal=causal, window=window, backend=backend)
        expected = reference(*qkv, visible)
        assert out.shape == (B, H, n_queries, v_size)
        assert_output_and_gradients(out, expected, qkv, visible)


@pytest.mark.parametrize(
    "v_size, n_kv_heads, mask_kind",
    [
        (3, 2, "no mask"),
        *(
            pytest.param(v_size, n_kv_heads, mask_kind, marks=pytest.mark.slow)
            for v_size in V_SIZES
            for n_kv_heads in (4, 1)
            for mask_kind in ("no mask", "(B, H, T, S)")
        ),
    ],
)
@torch.no_grad()
def test_values_of_another_size_match_the_reference_on_flex(v_size, n_kv_heads, mask_kind):
    q, k, v = make_qkv(5, 7, n_kv_heads, v_size=v_size)
    mask = make_mask(mask_kind, 5, 7)
    out = attention(q, k, v, mask=mask, causal=True, backend="flex")
    assert_close(out, reference(q, k, v, visible_by_loops(5, 7, True, None, mask)))


@pytest.mark.parametrize("v_size", V_SIZES)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_each_column_of_the_values_is_a_value_by_itself(backend, v_size):
    """The columns do not mix, so D_v columns equal D_v runs with one each, and those that torch computes."""
    q, k, v = make_qkv(6, 6, n_kv_heads=H, v_size=v_size)
    out = attention(q, k, v, causal=True, backend=backend)
    for column in range(v_size):
        one = v[..., column : column + 1]
        assert_close(out[..., column : column + 1], attention(q, k, one, causal=True, backend="explicit"))
    assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("max_weights", [0, 1 << 25], ids=["torch's kernel", "blockwise"])
@pytest.mark.parametrize("v_size", V_SIZES)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
def test_values_of_another_size_and_a_bias_in_bfloat16(monkeypatch, n_queries, n_keys, v_size, max_weights):
    """The two ways of the fused backend on a CPU. Inputs are bounded as in test_properties."""
    monkeypatch.setattr(tril.model.attention_fused, "MAX_WEIGHTS", max_weights)
    bias = torch.rand(H, n_queries, n_keys).masked_fill(torch.rand(H, n_queries, n_keys) < 0.2, -INF)
    inputs = [x.clamp(-1, 1).bfloat16() for x in (*make_qkv(n_queries, n_keys, v_size=v_size), bias)]
    inputs = [*inputs[:3], inputs[3].masked_fill(bias == -INF, -INF)]
    exact = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    visible = visible_by_loops(n_queries, n_keys, True, None)
    out = attention(*inputs[:3], bias=inputs[3], causal=True)
    expected = reference(*exact[:3], visible, exact[3])
    assert out.dtype == torch.bfloat16
    assert_close(out, expected, roundings=2 * (D**0.5 + 1) + 1)  # the largest score; see test_properties
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, upstream)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert_close(actual, wanted, roundings=8)
        assert actual.dtype == torch.bfloat16


# --- no queries, no keys, one of each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_queries, n_keys", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_without_queries_or_keys_the_output_is_empty_or_zero(backend, n_queries, n_keys, dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(n_queries, n_keys, v_size=5))
    scores = (n_queries, n_keys)
    options = [{}, {"causal": True}, {"mask": torch.ones(scores, dtype=torch.bool)}, {"bias": torch.zeros(scores)}]
    for option in options:
        out = attention(q, k, v, backend=backend, **option)
        assert out.shape == (B, H, n_queries, 5) and out.dtype == dtype and (out == 0).all()
        weights = attention(q, k, v, backend=backend, need_weights=True, **option)[1]
        assert weights.shape == (B, H, *scores)


@pytest.mark.parametrize("n_dims", [2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_one_query_and_one_key_return_the_value(backend, n_dims):
    q, k, v = torch.randn(3, *(1,) * (n_dims - 1), D)
    for options in ({}, {"causal": True}, {"causal": True, "window": 1}, {"mask": causal_mask(1, 1)}):
        assert torch.equal(attention(q, k, v, backend=backend, **options), v)
