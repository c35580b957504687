"""The probe of attention weights: what it reads, and the precision that it measures with."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, assert_close, tiny_gpt
from tril.model.causality.attention_check import check_attention
from tril.model.causality.attention_probe import TF32_EPS, eps_of_products, formula, used_weights
from tril.model.causality.case import Case
from tril.model.causality.receptive_field import expected_dependencies
from tril.model.causality.subject import GPTSubject

EPS = torch.finfo(torch.float32).eps
V, T = 31, 12
CHOICES = ({}, {"window": 3, "n_kv_heads": 2}, {"pos": "learned", "qk_norm": False}, {"head_dim": 6, "n_kv_heads": 1})


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
    visible = expected_dependencies(T, [choices.get("window")])
    expected, margin = formula(attn, lambda: model(ids), visible, rope=model.config.pos == "rope")
    assert ((used - expected).abs() <= margin).all() and margin.max() < 1e-4


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
