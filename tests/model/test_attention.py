"""`attention` and `attention_weights` against a float64 reference, on every backend.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value.
"""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tril.model.attention
from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close
from tril.model.attention import MultiHeadAttention, attention, attention_weights, causal_mask

B, H, D = 2, 4, 8
SIZES = [(6, 6), (3, 7), (7, 3), (1, 6), (6, 1)]  # (T, S)
VISIBILITY = [(False, None), (True, None), (True, 1), (True, 3), (True, 99)]  # (causal, window)
MASKS = ["no mask", "(S,)", "(T, S)", "(B, 1, 1, S)", "(B, 1, T, S)", "(B, H, T, S)", "(1, H, T, S)", "(B, 1, T, 1)"]


def make_qkv(n_queries, n_keys, n_kv_heads=2, dtype=torch.float32, v_size=D):
    sizes = ((H, n_queries, D), (n_kv_heads, n_keys, D), (n_kv_heads, n_keys, v_size))
    return tuple(torch.randn(B, *size, dtype=dtype) for size in sizes)


def make_mask(kind, n_queries, n_keys):
    """A random mask in which some rows are fully masked."""
    if kind == "no mask":
        return None
    sizes = {"B": B, "H": H, "T": n_queries, "S": n_keys}
    shape = [sizes.get(c) or int(c) for c in kind.strip("()").replace(",", " ").split()]
    mask = torch.rand(shape) < 0.6
    if kind != "(S,)":
        mask.flatten(0, -2)[0] = False
    return mask


def visible_by_loops(n_queries, n_keys, causal, window, mask=None):
    """(B, H, T, S), from one pair of positions after another."""
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool)
    for i in range(n_queries):
        for j in range(n_keys):
            distance = (i + n_keys - n_queries) - j
            visible[i, j] = not causal or 0 <= distance < (window or math.inf)
    visible = visible.expand(B, H, n_queries, n_keys)
    return visible if mask is None else visible & mask


def reference_weights(q, k, visible, bias=None):
    """exp(q k / sqrt(D) + bias), 0 where masked, divided by its sum: in float64, without softmax and masked scores."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("bhtd,bhsd->bhts", q.double(), k) / math.sqrt(q.shape[-1])
    exponentials = (scores if bias is None else scores + bias.double()).exp() * visible
    total = exponentials.sum(-1, keepdim=True)
    return exponentials / (total + (total == 0))


def reference(q, k, v, visible, bias=None):
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("bhts,bhsd->bhtd", reference_weights(q, k, visible, bias), v)


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("causal, window", VISIBILITY)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_output_and_gradients_match_the_reference(backend, n_queries, n_keys, causal, window, mask_kind):
    mask = make_mask(mask_kind, n_queries, n_keys)
    visible = visible_by_loops(n_queries, n_keys, causal, window, mask)
    qkv = [x.requires_grad_() for x in make_qkv(n_queries, n_keys)]
    out = attention(*qkv, mask=mask, causal=causal, window=window, backend=backend)
    expected = reference(*qkv, visible)
    assert_output_and_gradients(out, expected, qkv, visible)


def assert_output_and_gradients(out, expected, qkv, visible):
    assert_close(out, expected)
    assert (out[~visible.any(-1)] == 0).all()

    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, qkv, upstream)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, qkv, upstream.double()), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize(
    "n_queries, n_keys, causal, window, mask_kind",
    [
        (6, 6, False, None, "no mask"),
        (6, 6, True, 2, "no mask"),
        (6, 6, True, 3, "(B, 1, 1, S)"),
        pytest.param(6, 6, True, None, "no mask", marks=pytest.mark.slow),
        pytest.param(3, 7, True, None, "no mask", marks=pytest.mark.slow),
        pytest.param(1, 6, True, 3, "no mask", marks=pytest.mark.slow),
        pytest.param(7, 3, True, None, "no mask", marks=pytest.mark.slow),
        pytest.param(3, 7, False, None, "(S,)", marks=pytest.mark.slow),
        pytest.param(3, 7, True, None, "(B, H, T, S)", marks=pytest.mark.slow),
    ],
)
def test_flex_matches_the_reference(n_queries, n_keys, causal, window, mask_kind):
    mask = make_mask(mask_kind, n_queries, n_keys)
    q, k, v = make_qkv(n_queries, n_keys)
    out = attention(q, k, v, mask=mask, causal=causal, window=window, backend="flex")
    visible = visible_by_loops(n_queries, n_keys, causal, window, mask)
    assert_close(out, reference(q, k, v, visible))
    assert (out[~visible.any(-1)] == 0).all()


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_grouped_heads_equal_repeated_heads(backend, n_kv_heads):
    q, k, v = make_qkv(5, 7, n_kv_heads)
    out = attention(q, k, v, causal=True, backend=backend)
    assert_close(out, reference(q, k, v, visible_by_loops(5, 7, True, None)))
    for h in range(H):  # query head h reads key/value head h // (H / G)
        query, shared = slice(h, h + 1), slice(h * n_kv_heads // H, h * n_kv_heads // H + 1)
        expected = attention(q[:, query], k[:, shared], v[:, shared], causal=True, backend="explicit")
        assert_close(out[:, query], expected)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_equals_torchs_is_causal_where_queries_and_keys_are_aligned(backend):
    q, k, v = make_qkv(6, 6, n_kv_heads=H)
    out = attention(q, k, v, causal=True, backend=backend)
    assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("backend", TRAINABLE)
def test_queries_that_precede_the_first_key_give_zeros(backend):
    """The last query is at the position of the last key, so 5 queries and 2 keys leave 3 queries without a key."""
    q, k, v = make_qkv(5, 2)
    out = attention(q, k, v, causal=True, backend=backend)
    assert (out[:, :, :3] == 0).all() and (out[:, :, 3:] != 0).all()
    assert_close(out[:, :, 3], v[:, :, 0].repeat_interleave(2, dim=1))  # query 3 sees key 0 only
    weights = attention_weights(q, k, causal_mask(5, 2))
    assert torch.equal(weights.sum(-1) > 0, torch.tensor([0, 0, 0, 1, 1]).bool().expand(B, H, 5))


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradcheck(backend):
    q, k, v = (x[:1, ..., :2] for x in make_qkv(2, 3, dtype=torch.float64))
    qkv = [x.clone().requires_grad_() for x in (q[:, :2], k[:, :1], v[:, :1])]  # two query heads share one key head
    mask = torch.tensor([[[1, 1, 1], [0, 1, 1]], [[0, 0, 1], [1, 1, 1]]]).bool()  # head 1, query 0 is fully masked
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask=mask, causal=True, window=2, backend=backend), qkv)


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
def test_fully_masked_rows_give_zeros_and_no_gradient(backend, n_queries, n_keys):
    qkv = [x.requires_grad_() for x in make_qkv(n_queries, n_keys)]
    with torch.autograd.detect_anomaly(check_nan=True):
        out = attention(*qkv, mask=torch.zeros(n_queries, n_keys, dtype=torch.bool), causal=True, backend=backend)
        out.sum().backward()
    assert (out == 0).all()
    assert all((x.grad == 0).all() for x in qkv)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_anomaly_detection_reports_nothing_with_fully_masked_rows(backend):
    qkv, mask = [x.requires_grad_() for x in make_qkv(7, 5)], make_mask("(B, H, T, S)", 7, 5)
    with torch.autograd.detect_anomaly(check_nan=True):
        attention(*qkv, mask=mask, causal=True, window=2, backend=backend).square().sum().backward()
    assert all(x.grad.isfinite().all() and (x.grad != 0).any() for x in qkv)


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
def test_no_backend_receives_a_fully_masked_row(monkeypatch, n_queries, n_keys, mask_kind):
    """CPU kernels return zeros there; others return NaN, a mean, or a NaN gradient."""

    def spy(q, k, v, masking, dropout_p):
        mask, bias, causal, window = masking
        assert mask is None or not causal and window is None and mask.any(-1).all()
        assert not causal or n_queries <= n_keys
        assert bias is None or mask is not None and bias.isfinite().all()
        return torch.full_like(q, math.nan), torch.full((*q.shape[:3], k.shape[2]), math.nan)

    monkeypatch.setitem(tril.model.attention.BACKENDS, "explicit", spy)
    mask, finite = make_mask(mask_kind, n_queries, n_keys), torch.rand(n_queries, n_keys) < 0.5
    zeros_and_infinities = finite.float().log()
    for bias, both in [(None, mask), (zeros_and_infinities, finite if mask is None else finite & mask)]:
        out, weights = attention(
            *make_qkv(n_queries, n_keys), mask=mask, bias=bias, causal=True, backend="explicit", need_weights=True
        )
        sees_a_key = visible_by_loops(n_queries, n_keys, True, None, both).any(-1)
        for result in (out, weights):
            assert (result[~sees_a_key] == 0).all() and result[sees_a_key].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("by", ["causal", "mask", "bias"])
def test_masked_keys_have_no_effect_with_scores_of_ten_thousand(backend, by):
    q, k, v = make_qkv(6, 6, n_kv_heads=H)
    k[:, :, 4:] = 1e4 * q[:, :, 3:4]  # the masked keys 4 and 5 have by far the largest scores for query 3
    mask = torch.arange(6) < 4
    visible = {"causal": {"causal": True}, "mask": {"mask": mask}, "bias": {"bias": mask.float().log()}}[by]
    out = attention(q, k, v, **visible, backend=backend)
    assert_close(out[:, :, 3:4], reference(q[:, :, 3:4], k[:, :, :4], v[:, :, :4], True))

    k[:, :, 4:], v[:, :, 4:] = -k[:, :, 4:], 1e4  # masked keys and values change no bit
    assert torch.equal(attention(q, k, v, **visible, backend=backend)[:, :, 3], out[:, :, 3])


def test_weights_of_huge_scores_are_finite_and_exact():
    q = torch.full((1, 1, 4, 1), 100.0)
    k = torch.tensor([-1e9, 100.0, 100.0, 120.0]).view(1, 1, 4, 1)  # scores -1e11, 1e4, 1e4, 1.2e4
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    expected = torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0, 1.0], [1.0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(attention_weights(q, k, mask)[0, 0], expected)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_masked_keys_have_no_effect_where_all_visible_scores_are_very_negative(backend):
    q, k, v = torch.ones(1, 1, 4, D), torch.zeros(1, 1, 4, D), torch.randn(1, 1, 4, D)
    k[:, :, :2] = -1e10  # a finite number such as -1e9 in place of -inf would be too large
    out = attention(q, k, v, mask=torch.arange(4) < 2, backend=backend)
    assert_close(out, v[:, :, :2].mean(2, keepdim=True).expand_as(v))


def test_weights_of_a_fully_masked_row_have_finite_gradients():
    q, k = (x.requires_grad_() for x in make_qkv(5, 5)[:2])
    with torch.autograd.detect_anomaly(check_nan=True):
        attention_weights(q, k, make_mask("(B, H, T, S)", 5, 5)).square().sum().backward()
    assert (q.grad[0, 0, 0] == 0).all() and q.grad.isfinite().all() and k.grad.isfinite().all()


def test_weights_are_a_scaled_softmax_in_float32():
    q, k, _ = make_qkv(3, 7)
    expected = (q.double() @ k.double().repeat_interleave(2, dim=1).mT / math.sqrt(D)).exp()
    expected /= expected.sum(-1, keepdim=True)
    assert_close(attention_weights(q, k), expected)
    weights = attention_weights(q.bfloat16(), k.bfloat16())
    assert weights.dtype == torch.float32
    assert_close(weights.sum(-1), torch.ones(B, H, 3))  # bfloat16 would miss this precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("causal, window", [(False, None), (True, 3)])
def test_low_precision_is_close_to_float32(backend, causal, window, dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(6, 6))
    out = attention(q, k, v, causal=causal, window=window, backend=backend)
    assert out.dtype == dtype
    exact = attention(*(x.float() for x in (q, k, v)), causal=causal, window=window, backend="explicit")
    assert_close(out, exact, roundings=4)  # score, weight, product and sum are each rounded once


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_dropout_drops_weights_and_scales_up_the_rest(backend, p, causal):
    size = 16
    zeros = torch.zeros(8, H, size, 2 * size)  # all scores equal: a query that sees n keys gives each 1 / n
    v = torch.cat([torch.eye(size)] * 2, dim=-1).expand_as(zeros)  # the output is the weights, twice
    weights, again = attention(zeros, zeros, v, causal=causal, dropout_p=p, backend=backend).chunk(2, dim=-1)
    assert torch.equal(weights, again)  # weights are dropped, not outputs
    n_seen = torch.arange(1, size + 1) if causal else torch.full((size,), size)
    visible = (torch.arange(size) < n_seen[:, None]).expand_as(weights)
    kept = weights != 0
    assert not kept[~visible].any()
    assert_close(weights[kept], (1 / (n_seen * (1 - p)))[:, None].expand_as(weights)[kept])
    n = visible.sum().item()
    assert abs(kept.sum().item() / n - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)  # five standard deviations
    assert (kept[:, 0] != kept[:, 1]).any() and (kept[0] != kept[1]).any()  # each head and row draws separately


@pytest.mark.parametrize("backend", TRAINABLE)
def test_dropout_follows_the_seed_and_0_disables_it(backend):
    q, k, v = make_qkv(6, 6)

    def run(seed, p):
        torch.manual_seed(seed)
        return attention(q, k, v, causal=True, dropout_p=p, backend=backend)

    assert torch.equal(run(0, 0.5), run(0, 0.5))
    assert not torch.equal(run(0, 0.5), run(1, 0.5))
    assert torch.equal(run(0, 0.0), run(1, 0.0))


def test_the_explicit_path_is_at_most_six_functions_in_two_files():
    """From x to the output of the module, a reader follows the equation through few functions."""
    package = Path(tril.model.attention.__file__).parent
    functions = set()

    def record(frame, event, _):
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(package):
            functions.add((Path(frame.f_code.co_filename).name, frame.f_code.co_qualname))

    attn, x = MultiHeadAttention(24, 4, backend="explicit"), torch.randn(B, 6, 24)
    sys.setprofile(record)
    try:
        attn(x)
    finally:
        sys.setprofile(None)
    assert ("attention.py", "explicit") in functions
    assert len(functions) <= 6 and len({file for file, _ in functions}) <= 2, functions
