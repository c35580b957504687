"""The parts of the flex backend that act on CUDA only, tested without a GPU, and its calls without a compiler."""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.conftest import assert_close
from tril.model.attention import attention
from tril.model.attention_flex import compiled_flex


def test_the_recompile_limit_is_raised(monkeypatch):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count, dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=1):  # torch's limit in a new process is 8
        flex_attention = compiled_flex.__wrapped__()
        for length in (2, 3, 4):
            q = torch.randn(1, 2, length, 16)
            flex_attention(q, q, q)
    assert len(graphs) == 3
    torch._dynamo.reset()


@pytest.mark.parametrize("head_size", [8, 15])
def test_head_sizes_below_the_kernels_minimum_are_refused(head_size):
    with FakeTensorMode():  # tensors without values, on devices that need not exist
        q = torch.empty(1, 2, 4, head_size, device="cuda")
        with pytest.raises(
            ValueError, match=f"flex' needs a head size of at least 16 on CUDA, not {head_size}; use backend='fused'"
        ):
            attention(q, q, q, causal=True, backend="flex")


@pytest.mark.parametrize("v_size", [1, 15])
def test_values_below_the_kernels_minimum_take_another_path(v_size):
    with FakeTensorMode():
        q = torch.empty(1, 2, 4, 16, device="cuda")
        out = attention(q, q, torch.empty(1, 2, 4, v_size, device="cuda"), causal=True, backend="flex")
    assert out.shape == (1, 2, 4, v_size) and out.device.type == "cuda"


def test_a_cpu_traces_nothing_without_torch_compile():
    """torch traces the function and its mask for each new shape otherwise, which takes up to 1 s."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for length in (5, 9, 11):
        q = torch.randn(1, 2, length, 16)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        for options in ({"causal": True}, {"causal": True, "window": 3}, {"mask": mask}):
            expected = attention(q, q, q, **options, backend="explicit")
            assert_close(attention(q, q, q, **options, backend="flex"), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_tensors_that_require_a_gradient_are_accepted_without_gradients():
    q = torch.randn(1, 2, 4, 16, requires_grad=True)
    with torch.no_grad():
        out = attention(q, q, q, causal=True, backend="flex")
    assert_close(out, attention(q, q, q, causal=True, backend="explicit"))
