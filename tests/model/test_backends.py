"""`attention` and `attention_weights` against a float64 reference, on every backend.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import math

import pytest
import torch
import torch.nn.functional as F

import tril.model.attention
from tests.conftest import BACKENDS, TRAINABLE, assert_close
from tril.model.attention import attention, attention_weights

B, H, D = 2, 4, 8
SIZES = [(6, 6), (3, 7), (7, 3), (1, 6), (6, 1)]  # (T, S)
VISIBILITY = [(False, None), (True, None), (True, 1), (True, 3), (True, 99)]  # (causal, window)
MASKS = ["no mask", "(S,)", "(T, S)", "(B, 1, 1, S)", "(B, 1, T, S)", "(B, H, T, S)", "(1, H, T, S)", "(B, 1, T, 1)"]


def make_qkv(n_queries, n_keys, n_kv_heads=2, dtype=torch.float32):
    q = torch.randn(B, H, n_queries, D, dtype=dtype)
    k, v = torch.randn(2, B, n_kv_heads, n_keys, D, dtype=dtype)
    return q, k, v


def make_mask(kind, n_queries, n_keys):
    """A random mask that leaves some queries without any key."""
    if kind == "no mask":
        return None
    sizes = {"B": B, "H": H, "T": n_queries, "S": n_keys}
    shape = [sizes.get(c) or int(c) for c in kind.strip("()").replace(",", " ").split()]
    mask = torch.rand(shape) < 0.6
    if kind != "(S,)":
        mask.flatten(0, -2)[0] = False
    return mask


def visible_by_loops(n_queries, n_keys, causal, window, mask=None):
    """(B, H, T, S), from positions written out one by one."""
    visible = torch.ones(n_queries, n_keys, dtype=torch.bool)
    for i in range(n_queries):
        for j in range(n_keys):
            distance = (i + n_keys - n_queries) - j
            visible[i, j] = not causal or 0 <= distance < (window or math.inf)
    visible = visible.expand(B, H, n_queries, n_keys)
    return visible if mask is None else visible & mask


def reference(q, k, v, visible):
    """exp(q k / sqrt(D)), zero where hidden, divided by its sum, times v: float64, no softmax, no infinities."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    exponentials = torch.einsum("bhtd,bhsd->bhts", q, k).div(math.sqrt(D)).exp() * visible
    total = exponentials.sum(-1, keepdim=True)
    return torch.einsum("bhts,bhsd->bhtd", exponentials / (total + (total == 0)), v)


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
    assert_close(out, expected)
    assert (out[~visible.any(-1)] == 0).all()

    upstream = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, qkv, upstream), torch.autograd.grad(expected, qkv, upstream.double())
    ):
        assert_close(got, want)


@pytest.mark.parametrize(
    "n_queries, n_keys, causal, window, mask_kind",
    [
        (6, 6, False, None, "no mask"),
        (6, 6, True, None, "no mask"),
        (6, 6, True, 2, "no mask"),
        (3, 7, True, None, "no mask"),
        (1, 6, True, 3, "no mask"),
        (7, 3, True, None, "no mask"),
        (3, 7, False, None, "(S,)"),
        (6, 6, True, 3, "(B, 1, 1, S)"),
        (3, 7, True, None, "(B, H, T, S)"),
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
@pytest.mark.parametrize("backend", BACKENDS)
def test_grouped_heads_are_repeated_heads(backend, n_kv_heads):
    q, k, v = make_qkv(5, 7, n_kv_heads)
    out = attention(q, k, v, causal=True, backend=backend)
    assert_close(out, reference(q, k, v, visible_by_loops(5, 7, True, None)))
    for h in range(H):  # query head h reads key/value head h // (H / G)
        its = slice(h * n_kv_heads // H, h * n_kv_heads // H + 1)
        alone = attention(q[:, h : h + 1], k[:, its], v[:, its], causal=True, backend="explicit")
        assert_close(out[:, h : h + 1], alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_square_causal_case_is_torchs_own(backend):
    q, k, v = make_qkv(6, 6, n_kv_heads=H)
    assert_close(
        attention(q, k, v, causal=True, backend=backend), F.scaled_dot_product_attention(q, k, v, is_causal=True)
    )


@pytest.mark.parametrize("backend", TRAINABLE)
def test_gradcheck(backend):
    q, k, v = (x[:1, ..., :2] for x in make_qkv(2, 3, dtype=torch.float64))
    qkv = [x.clone().requires_grad_() for x in (q[:, :2], k[:, :1], v[:, :1])]  # two query heads share one key head
    mask = torch.tensor(
        [[[1, 1, 1], [0, 1, 1]], [[0, 0, 1], [1, 1, 1]]]
    ).bool()  # the second head's first query has no key left
    torch.autograd.gradcheck(lambda q, k, v: attention(q, k, v, mask=mask, causal=True, window=2, backend=backend), qkv)


@pytest.mark.parametrize("backend", TRAINABLE)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
def test_queries_without_keys_give_zeros_and_no_gradient(backend, n_queries, n_keys):
    qkv = [x.requires_grad_() for x in make_qkv(n_queries, n_keys)]
    with torch.autograd.detect_anomaly(check_nan=True):
        out = attention(*qkv, mask=torch.zeros(n_queries, n_keys, dtype=torch.bool), causal=True, backend=backend)
        out.sum().backward()
    assert (out == 0).all()
    assert all((x.grad == 0).all() for x in qkv)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_anomaly_detection_finds_nothing_where_some_queries_are_blind(backend):
    qkv = [x.requires_grad_() for x in make_qkv(7, 5)]
    with torch.autograd.detect_anomaly(check_nan=True):
        attention(
            *qkv, mask=make_mask("(B, H, T, S)", 7, 5), causal=True, window=2, backend=backend
        ).square().sum().backward()
    assert all(x.grad.isfinite().all() and (x.grad != 0).any() for x in qkv)


@pytest.mark.parametrize("mask_kind", MASKS)
@pytest.mark.parametrize("n_queries, n_keys", SIZES)
def test_no_backend_is_ever_given_a_query_without_keys(monkeypatch, n_queries, n_keys, mask_kind):
    """CPU kernels happen to give zeros there; others give NaN, a mean, or a NaN gradient."""

    def spy(q, k, v, mask, causal, window, dropout_p):
        assert mask is None or not causal and window is None and mask.any(-1).all()
        assert not causal or n_queries <= n_keys
        return torch.full_like(q, math.nan)

    monkeypatch.setitem(tril.model.attention.BACKENDS, "explicit", spy)
    mask = make_mask(mask_kind, n_queries, n_keys)
    out = attention(*make_qkv(n_queries, n_keys), mask=mask, causal=True, backend="explicit")
    visible = visible_by_loops(n_queries, n_keys, True, None, mask)
    assert (out[~visible.any(-1)] == 0).all() and out[visible.any(-1)].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("by", ["causal", "mask"])
def test_hidden_keys_get_nothing_even_with_scores_of_ten_thousand(backend, by):
    q, k, v = make_qkv(6, 6, n_kv_heads=H)
    k[:, :, 4:] = 1e4 * q[:, :, 3:4]  # for query 3 the hidden keys 4 and 5 are by far the best
    visible = {"causal": True} if by == "causal" else {"mask": torch.arange(6) < 4}
    out = attention(q, k, v, **visible, backend=backend)
    assert_close(out[:, :, 3:4], reference(q[:, :, 3:4], k[:, :, :4], v[:, :, :4], True))

    k[:, :, 4:], v[:, :, 4:] = -k[:, :, 4:], 1e4  # what is hidden makes no difference at all
    assert torch.equal(attention(q, k, v, **visible, backend=backend)[:, :, 3], out[:, :, 3])


def test_weights_of_huge_scores_are_finite_and_exact():
    q = torch.full((1, 1, 4, 1), 100.0)
    k = torch.tensor([-1e9, 100.0, 100.0, 120.0]).view(1, 1, 4, 1)  # scores -1e11, 1e4, 1e4, 1.2e4
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    expected = torch.tensor([[0, 0.5, 0.5, 0], [0, 0, 0, 1.0], [1.0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.equal(attention_weights(q, k, mask)[0, 0], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hidden_keys_get_nothing_where_all_visible_scores_are_tiny(backend):
    q, k, v = torch.ones(1, 1, 4, D), torch.zeros(1, 1, 4, D), torch.randn(1, 1, 4, D)
    k[:, :, :2] = -1e10  # no number that stands for "hidden" is small enough
    assert_close(
        attention(q, k, v, mask=torch.arange(4) < 2, backend=backend), v[:, :, :2].mean(2, keepdim=True).expand_as(v)
    )


def test_weights_of_a_blind_query_pass_finite_gradients():
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
    assert_close(weights.sum(-1), torch.ones(B, H, 3))  # to float32's precision, which bfloat16 would miss


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal, window", [(False, None), (True, 3)])
def test_bfloat16_is_close_to_float32(backend, causal, window):
    q, k, v = (x.bfloat16() for x in make_qkv(6, 6))
    out = attention(q, k, v, causal=causal, window=window, backend=backend)
    assert out.dtype == torch.bfloat16
    exact = attention(*(x.float() for x in (q, k, v)), causal=causal, window=window, backend="explicit")
    assert_close(out, exact, roundings=4)  # score, weight, product and sum are rounded once each


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
    assert (kept[:, 0] != kept[:, 1]).any() and (kept[0] != kept[1]).any()  # every head and row has its own


@pytest.mark.parametrize("backend", TRAINABLE)
def test_dropout_follows_the_seed_and_zero_means_none(backend):
    q, k, v = make_qkv(6, 6)

    def run(seed, p):
        torch.manual_seed(seed)
        return attention(q, k, v, causal=True, dropout_p=p, backend=backend)

    assert torch.equal(run(0, 0.5), run(0, 0.5))
    assert not torch.equal(run(0, 0.5), run(1, 0.5))
    assert torch.equal(run(0, 0.0), run(1, 0.0))


def test_flex_refuses_what_it_cannot_do():
    q, k, v = make_qkv(4, 4)
    with pytest.raises(ValueError, match="flex.*no attention dropout.*0.1"):
        attention(q, k, v, dropout_p=0.1, backend="flex")
    with pytest.raises(ValueError, match="flex.*cannot train on cpu.*use backend='fused'"):
        attention(q, k.clone().requires_grad_(), v, backend="flex")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"window": 3}, "window=3 .*needs causal=True"),
        ({"window": 0, "causal": True}, "window=0 must be at least 1"),
        ({"mask": torch.ones(6, 6)}, r"mask must be boolean.*torch.float32.*mask.bool\(\)"),
        ({"mask": torch.ones(6, 6, dtype=torch.complex64)}, "mask must be boolean.*torch.complex64"),
        ({"mask": torch.ones(6, 5, dtype=torch.bool)}, r"\(6, 5\) does not broadcast to .* \(2, 4, 6, 6\)"),
        ({"dropout_p": 1.0}, "dropout_p=1.0 must be at least 0 and below 1"),
        ({"dropout_p": -0.1}, "dropout_p=-0.1"),
        ({"dropout_p": float("nan")}, "dropout_p=nan"),
    ],
)
def test_wrong_arguments_are_refused_on_every_backend(backend, wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(*make_qkv(6, 6), backend=backend, **wrong)


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 5, 8)),  # k and v of different lengths
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 9)),
        ((2, 4, 6, 8), (2, 4, 6, 9), (2, 4, 6, 9)),  # head sizes
        ((2, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8)),  # batches
        ((2, 4, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),  # 4 query heads, 3 key heads
        ((2, 4, 6, 8), (2, 8, 6, 8), (2, 8, 6, 8)),
        ((4, 6, 8), (4, 6, 8), (4, 6, 8)),  # no batch
    ],
)
def test_wrong_shapes_are_refused_and_named(q, k, v):
    with pytest.raises(ValueError) as error:
        attention(torch.randn(q), torch.randn(k), torch.randn(v))
    assert all(str(shape) in str(error.value) for shape in (q, k, v))


def test_unknown_backend_is_refused_with_the_legal_names():
    with pytest.raises(ValueError, match="'flash' is not one of stacked, explicit, fused, flex"):
        attention(*make_qkv(6, 6), backend="flash")
