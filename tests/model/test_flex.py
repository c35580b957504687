"""What FlexAttention does on CUDA alone, as far as it shows without a GPU."""

import functools

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tril.model.attention import attention
from tril.model.backends import _compiled_flex


def test_more_forms_are_compiled_than_torch_would_by_itself(monkeypatch):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=count, dynamic=False))
    with torch._dynamo.config.patch(recompile_limit=8):  # as it is when a process starts
        flex_attention = _compiled_flex.__wrapped__()
        for length in range(2, 14):
            q = torch.randn(1, 2, length, 16)
            flex_attention(q, q, q)
    assert len(graphs) == 12
    torch._dynamo.reset()


@pytest.mark.parametrize("head_size", [8, 15])
def test_heads_that_are_too_small_for_its_kernels_are_refused(head_size):
    with FakeTensorMode():  # tensors without values, of devices that need not be there
        q = torch.empty(1, 2, 4, head_size, device="cuda")
        with pytest.raises(
            ValueError, match=f"flex' needs a head size of at least 16 on CUDA, not {head_size}; use backend='fused'"
        ):
            attention(q, q, q, causal=True, backend="flex")
