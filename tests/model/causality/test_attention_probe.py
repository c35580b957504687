"""The probe of attention weights: what it reads, and the precision that it measures with."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, assert_close, randomize, tiny_gpt
from tril.model.attention import BACKENDS, MultiHeadAttention, explicit
from tril.model.causality.attention_check import check_attention
from tril.model.causality.attention_formula import ScoreFormula, expected_alibi
from tril.model.causality.attention_probe import TF32_EPS, eps_of_products, formula, used_weights
from tril.model.causality.case import Case
from tril.model.causality.subject import GPTSubject, ProbedLayer

EPS = torch.finfo(torch.float32).eps
V, T = 31, 12
CHOICES = (
    {},
    {"window": 3, "n_kv_heads": 2},
    {"pos": "learned", "qk_norm": False},
    {"head_dim": 6, "n_kv_heads": 1},
    {"rope_base": 20.0, "norm_eps": 0.1},
    {"pos": "alibi", "n_heads": 6, "head_dim": 4, "qk_norm": "layernorm", "norm_eps": 0.1},
    {"qk_norm": "layernorm", "qkv_bias": True},
)


@pytest.mark.parametrize("choices", CHOICES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_the_probe_reads_the_weights_of_any_backend(backend, choices):
    """They agree with the weights that the module returns, and with the formula."""
    model = tiny_gpt(**choices, backend=backend)
    attn, ids = model.blocks[1].attn, torch.randint(V, (2, T))
    before = model(ids)
    used = used_weights(attn, lambda: model(ids), T)  # (B, H, T, S)
    seen = []
    hook = attn.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    assert torch.equal(model(ids), before)  # the probe removed its hooks
    hook.remove()
    _, returned = attn(*seen[0][0], **seen[0][1], need_weights=True)
    assert_close(used, returned)
    layer = GPTSubject(model).probed_layers(T)[1]
    expected, margin = formula(layer, lambda: model(ids))
    assert layer.module is attn and ((used - expected).abs() <= margin).all() and margin.max() < 1e-4


SIZES = ({"v_head_dim": 5}, {"v_head_dim": 11, "out_proj": False}, {"out_dim": 9, "out_bias": True, "n_kv_heads": 2})


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_the_probe_reads_the_weights_of_other_sizes_and_of_a_context(backend, sizes):
    attn = randomize(MultiHeadAttention(32, 4, kv_dim=24, causal=False, backend=backend, **sizes))
    x, context, bias = torch.randn(2, T, 32), torch.randn(2, 5, 24), torch.randn(4, T, 5)
    bias[1, 3], bias[2, :, 4] = -math.inf, -math.inf  # head 1, query 3 sees nothing

    def run():
        for part in (slice(0, 5), slice(5, T)):  # in chunks of queries, the first as long as the context
            attn(x[:, part], context, bias=bias[:, part])

    _, returned = attn(x, context, bias=bias, need_weights=True)
    used = used_weights(attn, run, 5, T)
    assert used.shape == (2, 4, T, 5)
    assert_close(used, returned)
    layer = ProbedLayer("", attn, bias > -math.inf, ScoreFormula(bias=bias))
    expected, margin = formula(layer, run)
    assert ((used - expected).abs() <= margin).all() and margin.max() < 1e-4
    assert (used[:, 1, 3] == 0).all() and (expected[:, 1, 3] == 0).all()


@torch.no_grad()
def test_the_bound_covers_what_a_layernorm_cancels():
    """Of two numbers that are almost equal, float32 keeps a part of the difference only."""
    model = tiny_gpt(qk_norm="layernorm", qkv_bias=True, head_dim=2)
    layer, ids = GPTSubject(model).probed_layers(T)[1], torch.randint(V, (2, T))
    layer.module.q_proj.bias.fill_(100.0)  # larger than all differences
    used = used_weights(layer.module, lambda: model(ids), T)
    expected, margin = formula(layer, lambda: model(ids))
    difference = (used - expected).abs()
    assert (difference <= margin).all() and difference.max() > 1e-5


@torch.no_grad()
def test_the_bound_covers_a_bias_that_is_larger_than_the_scores():
    attn, x = MultiHeadAttention(32, 4, backend="explicit"), 0.01 * torch.randn(1, T, 32)
    bias = 1000 + torch.randn(4, T, T)
    layer = ProbedLayer("", attn, torch.ones(T, T).tril() > 0, ScoreFormula(bias=bias))
    used, (expected, margin) = (
        used_weights(attn, lambda: attn(x, bias=bias), T),
        formula(layer, lambda: attn(x, bias=bias)),
    )
    difference = (used - expected).abs()
    assert (difference <= margin).all() and difference.max() > 1e-5 and margin.max() < 1e-3


@torch.no_grad()
def test_the_probe_shows_values_of_another_group(monkeypatch):
    attn = randomize(MultiHeadAttention(32, 4, n_kv_heads=2, backend="explicit"))
    x = torch.randn(1, T, 32)
    before = used_weights(attn, lambda: attn(x), T)
    monkeypatch.setitem(BACKENDS, "explicit", lambda q, k, v, *rest: explicit(q, k, v.flip(1), *rest))
    after = used_weights(attn, lambda: attn(x), T)
    assert_close(after[:, :2], 2 * before[:, :2])
    assert_close(after[:, 2:], before[:, 2:] / 2)


def test_expected_alibi_is_the_published_one():
    eight = expected_alibi(8, 3, 3)
    assert eight[:, 2, 0].tolist() == [-2 / 2**i for i in range(1, 9)]  # 1/2, 1/4 ... 1/256
    assert eight[0].tolist() == [[0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]]
    six = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]  # get_slopes(6) of the authors' code
    assert expected_alibi(6, 1, 2)[:, 0, 0].tolist() == [-slope for slope in six]
    assert expected_alibi(1, 2, 4)[0].tolist() == [[-2 / 256, -1 / 256, 0, -1 / 256], [-3 / 256, -2 / 256, -1 / 256, 0]]


@torch.no_grad()
def test_the_probe_follows_decoding_in_chunks():
    model = tiny_gpt()
    ids = torch.randint(V, (1, T))

    def decode():
        cache = model.new_cache(1)
        for part in ids.split([5, 1, 4, 2], dim=1):
            model(part, cache=cache)

    attn = model.blocks[1].attn
    assert_close(used_weights(attn, decode, T), used_weights(attn, lambda: model(ids), T))


def in_tf32(x):
    """Rounded to 10 of float32's 23 bits of mantissa, as a GPU rounds the factors of a product."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32) if x.dtype == torch.float32 else x


@pytest.mark.parametrize("scale", [1.0, 1.2])
@pytest.mark.parametrize("backend", ["explicit", "stacked"])
def test_weights_of_tf32_products_are_measured_at_that_precision(monkeypatch, backend, scale):
    """They still fail where the scores do not follow the formula."""
    case = Case(GPTSubject(tiny_gpt(backend=backend)), {}, [12], budget=math.inf)
    ids, product, root = torch.randint(31, (12,)), torch.Tensor.__matmul__, math.sqrt
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(in_tf32(a), in_tf32(b)))
    scaled = SimpleNamespace(sqrt=lambda n: root(n) / scale, inf=math.inf)
    monkeypatch.setattr("tril.model.attention.math", scaled)

    def passed():
        return all(result.passed for result in check_attention(case, ids, lambda subject, ids: subject(ids)))

    assert not passed()
    monkeypatch.setattr("tril.model.causality.attention_probe.eps_of_products", lambda x: TF32_EPS)
    assert passed() is (scale == 1.0)


@pytest.mark.parametrize(("device", "dtype", "precision", "supported", "eps"), [
    ("cuda", torch.float32, "high", True, 2**-10), ("cuda", torch.float32, "medium", True, 2**-10),
    ("cuda", torch.float32, "highest", True, EPS), ("cuda", torch.float32, "high", False, EPS),
    ("cpu", torch.float32, "high", True, EPS), ("mps", torch.float32, "high", True, EPS),
    ("cuda", torch.bfloat16, "high", True, 2**-7), ("cuda", torch.float64, "high", True, 2**-52),
])  # fmt: skip
def test_products_are_in_tf32_only_where_torch_uses_it(monkeypatch, device, dtype, precision, supported, eps):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: supported)
    assert eps_of_products(SimpleNamespace(device=torch.device(device), dtype=dtype)) == eps
