"""The choice among torch's attention kernels, with simulated times of a GPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from tril.model.config import GPTConfig
from tril.model.training import attention_kernels as kernels
from tril.model.training.hardware import Hardware

ON_CPU = Hardware("cpu", "32-true", None, "a CPU", None)
ON_CUDA = replace(ON_CPU, accelerator="cuda", precision="bf16-mixed")
CONFIG = GPTConfig(vocab_size=8, context_length=6, dim=16, n_heads=4, n_kv_heads=2)


def preferred():
    """The kernels that torch may use, in order of priority, without one that is always on."""
    return [kernel for kernel in _cur_sdpa_kernel_backends(with_priority=True) if kernel != SDPBackend.OVERRIDEABLE]


def test_each_kernel_is_timed_alone_forward_and_backward_and_sorted(monkeypatch):
    seen, attended, slopes = [], [], []

    def clock(work, hardware):
        [kernel] = preferred()
        seen.append(kernel)
        if kernel == SDPBackend.CUDNN_ATTENTION:
            raise RuntimeError("No available kernel. Aborting execution.")
        work()
        return {SDPBackend.FLASH_ATTENTION: 0.5, SDPBackend.EFFICIENT_ATTENTION: 0.2}[kernel]

    def attention(q, k, v, **options):
        attended.append((q.shape, k.shape, v.shape, q.dtype, options))
        return (q.unflatten(1, (2, 2)) * (k + v)[:, :, None]).flatten(1, 2)

    gradients = torch.autograd.grad
    monkeypatch.setattr(kernels, "seconds", clock)
    monkeypatch.setattr(kernels, "attention", attention)
    monkeypatch.setattr(
        torch.autograd,
        "grad",
        lambda out, inputs, slope: (slopes.append((len(inputs), slope.shape)), gradients(out, inputs, slope))[1],
    )
    before, state = preferred(), torch.get_rng_state()
    times = kernels.compare([(3, 6, 4, 4), (3, 6, 2, 4), (3, 6, 2, 4)], replace(ON_CPU, precision="bf16-mixed"))
    assert seen == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    assert list(times.items()) == [("efficient", pytest.approx(20)), ("flash", pytest.approx(50))]
    shapes = (3, 4, 6, 4), (3, 2, 6, 4), (3, 2, 6, 4)
    assert attended == [(*shapes, torch.bfloat16, {"causal": True, "backend": "fused"})] * 2 * kernels.CALLS
    assert slopes == [(3, (3, 4, 6, 4))] * 2 * kernels.CALLS
    assert preferred() == before and torch.equal(torch.get_rng_state(), state)


def test_a_kernel_of_a_cpu_is_timed():
    assert kernels.compare([(1, 6, 4, 4)] * 3, ON_CPU)["flash"] > 0


@pytest.mark.parametrize(
    ("changes", "options", "compared"),
    [
        ({}, {}, True),
        ({"window": 6}, {}, True),
        ({"window": 5}, {}, False),
        ({"attn_dropout": 0.1}, {}, False),
        ({"resid_dropout": 0.1}, {}, True),
        ({"backend": "explicit"}, {}, False),
        ({"n_heads": 0, "n_kv_heads": None}, {}, False),
        ({}, {"documents": True}, False),
        ({"pos": "alibi"}, {}, False),
        ({"pos": "none"}, {}, True),
    ],
    ids=str,
)
def test_kernels_are_compared_on_the_shape_of_the_run_if_there_is_a_choice(monkeypatch, changes, options, compared):
    asked = []
    monkeypatch.setattr(
        kernels, "compare", lambda shapes, hardware, causal: (asked.append((shapes, causal)), {"flash": 1.0})[1]
    )
    config = replace(CONFIG, **changes)
    assert kernels.measure(config, 3, ON_CPU, **options) == {}
    assert kernels.measure(config, 3, ON_CUDA, **options) == ({"flash": 1.0} if compared else {})
    assert asked == compared * [([(3, 6, 4, 4), (3, 6, 2, 4), (3, 6, 2, 4)], True)]


def test_the_fastest_is_preferred_and_all_stay_enabled():
    before = preferred()
    with kernels.prefer({"cudnn": 1.0, "flash": 2.0}):
        assert preferred() == [
            SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
        ]  # fmt: skip
    assert preferred() == before
    with kernels.prefer({}):
        assert preferred() == before


def test_compiled_code_is_cached_per_preference():
    """By the key of torch's cache on disk: the program does not name its kernel."""
    config, tags = torch.compiler.config, []
    with config.patch(cache_key_tag="tag"):
        for times in ({"cudnn": 1.0, "flash": 2.0}, {"flash": 1.0, "cudnn": 2.0}, {}):
            with kernels.prefer(times):
                tags.append(config.cache_key_tag)
            assert config.cache_key_tag == "tag"
    assert tags == ["tag cudnn flash efficient", "tag flash cudnn efficient", "tag"]
