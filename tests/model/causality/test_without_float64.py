"""A model on a device without float64, such as MPS.

The meta device replaces it, with torch's fake tensors: they have shape, dtype and device but no values, and unlike real
meta tensors they can be moved to the CPU.

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
from tril.model.causality import attention_check
from tril.model.causality.attention_probe import formula
from tril.model.causality.case import Case
from tril.model.causality.subject import GPTSubject, float64_device

T = 12


def test_float64_is_computed_on_the_device_of_the_model_except_for_mps():
    assert [float64_device(torch.device(name)).type for name in ("cpu", "cuda", "mps")] == ["cpu", "cuda", "cpu"]


class NoFloat64(FakeTensorMode):
    def __torch_dispatch__(self, *args):
        result = super().__torch_dispatch__(*args)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.device.type == "meta" and x.dtype in (torch.float64, torch.complex128):
                raise TypeError("this device has no float64")
        return result

    def __deepcopy__(self, memo):  # a copy of a model stays on the same device
        return self


@pytest.fixture
def subject(monkeypatch):
    for user in ("subject", "attention_probe"):
        monkeypatch.setattr(f"tril.model.causality.{user}.float64_device", lambda device: torch.device("cpu"))
    # The device has no random numbers either.
    monkeypatch.setattr("tril.model.causality.subject.same_random_numbers", lambda device: contextlib.nullcontext())
    with NoFloat64():
        with torch.device("meta"):
            model = tiny_gpt()
        yield GPTSubject(model)


def test_the_device_has_no_float64(subject):
    assert {x.device.type for x in (*subject.module.parameters(), *subject.module.buffers())} == {"meta"}
    with pytest.raises(TypeError, match="float64"):
        subject.module.embed.weight.double()


def test_the_formula_is_computed_on_a_device_with_float64(subject):
    layer, ids = subject.probed_layers(T)[0], torch.zeros(1, T, dtype=torch.long, device="meta")
    weights, margin = formula(layer, lambda: subject(ids))
    for x in (weights, margin):
        assert (x.device.type, x.dtype, tuple(x.shape)) == ("cpu", torch.float64, (1, 4, T, T))


def test_the_weights_are_compared_on_a_device_with_float64(subject):
    used, expected = torch.zeros(4, T, T, device="meta"), torch.zeros(4, T, T, dtype=torch.float64)
    with pytest.raises(DynamicOutputShapeException, match="nonzero"):  # after the comparison, at its first value
        attention_check._compare(Case(subject, {}, [T], budget=math.inf), T, [used], [(expected, expected)], 0, "")


class Exact:
    device = torch.device("cpu")

    def __call__(self, ids):
        return torch.zeros(*ids.shape, 31, dtype=torch.float64)


def test_the_rounding_is_measured_on_a_device_with_float64(subject, monkeypatch):
    monkeypatch.setattr(GPTSubject, "in_float64", lambda self: Exact())  # modules of fake tensors cannot be moved
    with pytest.raises(DataDependentOutputException, match="_local_scalar_dense"):  # at the first value
        Case(subject, {}, [T], budget=math.inf).bound()
