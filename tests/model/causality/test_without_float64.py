"""A model on a device that has no float64, as MPS. The meta device stands for it, in torch's fake tensors, of which shape, dtype and device
are known, but no values: unlike true ones these can be brought to the CPU.

T positions.
"""

import contextlib
import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from tests.conftest import tiny_gpt
from tril.model.causality import checks
from tril.model.causality.attention_probe import formula
from tril.model.causality.case import Cell
from tril.model.causality.subject import GPTSubject, float64_device

T = 12


def test_float64_is_computed_where_the_model_lies_unless_that_is_mps():
    assert [float64_device(torch.device(name)).type for name in ("cpu", "cuda", "mps")] == ["cpu", "cuda", "cpu"]


class NoFloat64(FakeTensorMode):
    def __torch_dispatch__(self, *args):
        result = super().__torch_dispatch__(*args)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "meta" and x.dtype in (torch.float64, torch.complex128):
                raise TypeError("this device has no float64")
        return result

    def __deepcopy__(self, memo):  # a copied model is on the same device
        return self


@pytest.fixture
def subject(monkeypatch):
    for user in ("subject", "attention_probe"):
        monkeypatch.setattr(f"tril.model.causality.{user}.float64_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(
        "tril.model.causality.subject.same_random_numbers", lambda device: contextlib.nullcontext()
    )  # it has none either
    with NoFloat64():
        with torch.device("meta"):
            model = tiny_gpt()
        yield GPTSubject(model)


def test_a_model_can_be_there(subject):
    assert {x.device.type for x in (*subject.module.parameters(), *subject.module.buffers())} == {"meta"}
    with pytest.raises(TypeError, match="float64"):
        subject.module.embed.weight.double()


def test_the_formula_is_computed_where_there_is_float64(subject):
    attn, ids = subject.module.blocks[0].attn, torch.zeros(1, T, dtype=torch.long, device="meta")
    weights, margin = formula(attn, lambda: subject(ids), torch.ones(T, T).tril().bool(), rope=True)
    for found in (weights, margin):
        assert (found.device.type, found.dtype, tuple(found.shape)) == ("cpu", torch.float64, (1, 4, T, T))


def test_the_weights_are_compared_where_there_is_float64(subject, monkeypatch):
    monkeypatch.setattr(checks, "_no_forbidden_weight", lambda cell, length, weights: None)  # which reads values
    cell, ids = Cell(subject, {}, [T], budget=math.inf), torch.zeros(T, dtype=torch.long, device="meta")
    with pytest.raises(
        DynamicOutputShapeException, match="nonzero"
    ):  # the comparison is done: which differ would be a value
        list(checks.attention(cell, ids, lambda subject, ids: subject(ids)))


class Exact:
    device = torch.device("cpu")

    def __call__(self, ids):
        return torch.zeros(*ids.shape, 31, dtype=torch.float64)


def test_the_rounding_is_measured_where_there_is_float64(subject, monkeypatch):
    monkeypatch.setattr(GPTSubject, "in_float64", lambda self: Exact())  # modules of fake tensors do not move
    with pytest.raises(
        DataDependentOutputException, match="_local_scalar_dense"
    ):  # all is computed: how much it is would be a value
        Cell(subject, {}, [T], budget=math.inf).bound()
