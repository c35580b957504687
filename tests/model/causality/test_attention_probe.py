"""By which precision the weights that a backend used are measured. What the probe reads off is tested in test_reach.py."""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import tiny_gpt
from tril.model.causality.attention_probe import TF32_EPS, eps_of_products
from tril.model.causality.case import Cell
from tril.model.causality.checks import attention
from tril.model.causality.subject import GPTSubject

EPS = torch.finfo(torch.float32).eps


def in_tf32(x):
    """Rounded to 10 of float32's 23 bits of mantissa, as a GPU rounds the factors of a product."""
    return ((x.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32) if x.dtype == torch.float32 else x


@pytest.mark.parametrize("scale", [1.0, 1.2])
@pytest.mark.parametrize("backend", ["explicit", "stacked"])
def test_weights_of_products_in_tf32_are_measured_by_its_precision(monkeypatch, backend, scale):
    """And are refused all the same where the scores are not those of the formula."""
    cell = Cell(GPTSubject(tiny_gpt(backend=backend)), {}, [12], budget=math.inf)
    ids, product, root = torch.randint(31, (12,)), torch.Tensor.__matmul__, math.sqrt
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: product(in_tf32(a), in_tf32(b)))
    monkeypatch.setattr("tril.model.backends.math", SimpleNamespace(sqrt=lambda n: root(n) / scale, inf=math.inf))

    def passed():
        return all(result.passed for result in attention(cell, ids, lambda subject, ids: subject(ids)))

    assert not passed()
    monkeypatch.setattr("tril.model.causality.attention_probe.eps_of_products", lambda x: TF32_EPS)
    assert passed() is (scale == 1.0)


@pytest.mark.parametrize(("device", "dtype", "precision", "supported", "eps"), [
    ("cuda", torch.float32, "high", True, 2**-10), ("cuda", torch.float32, "medium", True, 2**-10),
    ("cuda", torch.float32, "highest", True, EPS), ("cuda", torch.float32, "high", False, EPS), ("cpu", torch.float32, "high", True, EPS),
    ("mps", torch.float32, "high", True, EPS), ("cuda", torch.bfloat16, "high", True, 2**-7),
    ("cuda", torch.float64, "high", True, 2**-52),
])  # fmt: skip
def test_products_are_in_tf32_only_where_torch_makes_them_so(monkeypatch, device, dtype, precision, supported, eps):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: supported)
    assert eps_of_products(SimpleNamespace(device=torch.device(device), dtype=dtype)) == eps
