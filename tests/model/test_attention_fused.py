"""The fused backend in bf16 on a CPU, which works on blocks of queries, against a float64 loop and torch's kernel.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tril.model.attention_fused
from tests.conftest import assert_close
from tests.model.test_properties import COMMON, VISIBILITY, assert_equals_loops, cases
from tril.model.attention import attention


@pytest.fixture(params=[1, 3, 256], ids="blocks of {}".format)
def block(request, monkeypatch):
    monkeypatch.setattr(tril.model.attention_fused, "QUERY_BLOCK", request.param)
    return request.param


@pytest.mark.parametrize("visibility", VISIBILITY)
@settings(**COMMON, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])  # `block` is constant
@given(data=st.data())
def test_blocks_of_queries_equal_the_plain_loop(block, visibility, data):
    assert_equals_loops(data.draw(cases(visibility, dtypes=[torch.bfloat16])), "fused")


def qkv(n_queries=7, n_keys=7, n_heads=4, n_kv_heads=2, size=8):
    shapes = ((n_heads, n_queries), (n_kv_heads, n_keys), (n_kv_heads, n_keys))
    return [torch.randn(2, *shape, size).bfloat16().requires_grad_() for shape in shapes]


CHOICES = {
    "all": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 3},
    "mask": {"mask": torch.rand(2, 1, 7, 7) < 0.6},
}


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_gradients_equal_those_in_float32(block, choices):
    inputs, upstream = qkv(), torch.randn(2, 4, 7, 8)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    attention(*inputs, backend="fused", **choices).backward(upstream.bfloat16())
    attention(*exact, backend="explicit", **choices).backward(upstream.bfloat16().float())
    for x, reference in zip(inputs, exact, strict=True):
        # Relative to the largest gradient: each is a sum of many products of rounded scores, weights and gradients.
        limit = 4 * torch.finfo(torch.bfloat16).eps * reference.grad.abs().max()
        assert (x.grad.float() - reference.grad).abs().max() <= limit


def test_above_max_weights_torchs_kernel_computes_the_same(monkeypatch):
    q, k, v = (x.detach() for x in qkv())
    blockwise = attention(q, k, v, causal=True)
    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(*args, **options):
        calls.append(1)
        return kernel(*args, **options)

    monkeypatch.setattr(tril.model.attention_fused.F, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(tril.model.attention_fused, "MAX_WEIGHTS", 2 * 4 * 7 * 7 - 1)
    assert_close(attention(q, k, v, causal=True), blockwise.double(), roundings=8)  # both round
    assert len(calls) == 1


def test_masked_keys_and_values_change_no_bit(block):
    q, k, v = (x.detach() for x in qkv())
    before = attention(q, k, v, causal=True)
    k[:, :, 4:], v[:, :, 4:] = 100, -100
    after = attention(q, k, v, causal=True)
    assert torch.equal(before[:, :, :4], after[:, :, :4]) and not torch.equal(before[:, :, 4:], after[:, :, 4:])


def test_dropout_drops_weights_and_keeps_their_mean(block):
    q, k, _ = (x.detach() for x in qkv(n_queries=5, n_keys=400, n_kv_heads=4))
    ones = torch.ones(2, 4, 400, 8).bfloat16()
    out = attention(q * 0, k, ones, dropout_p=0.5).float()  # 400 equal weights: half are dropped, half doubled
    assert not torch.equal(out, torch.ones_like(out))
    assert (out.mean() - 1).abs() < 6 * (1 / (400 * out[..., 0].numel())) ** 0.5  # six standard errors
