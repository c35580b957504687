"""`attention` and `MultiHeadAttention` under torch.compile without graph breaks, and without values on the meta device.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width.
"""

import pytest
import torch

from tests.conftest import BACKENDS, TRAINABLE, assert_close, randomize
from tests.model.test_attention import B, H, make_mask, make_qkv
from tests.model.test_attention_bias import make_bias
from tril.model.attention import MultiHeadAttention, attention
from tril.model.kv_cache import KVCache

C = 24
SIZES = [(6, 6), (3, 7), (7, 3), (1, 6)]  # (T, S)
OPTIONS = [
    {},
    {"causal": True},
    {"causal": True, "window": 2, "mask": "(B, 1, T, S)"},
    {"bias": "(H, T, S)"},
    {"causal": True, "mask": "(T, S)", "bias": "(B, 1, 1, S)", "need_weights": True},
]

MODULES = [{"v_head_dim": 5, "qk_norm": "layernorm"}, {"out_proj": False}]


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiled(request):
    """torch.compile that fails at a graph break: with torch's own kernels, or with those of the compiler."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, backend=request.param, fullgraph=True, dynamic=False)
    torch._dynamo.reset()


def created(options, n_queries, n_keys):
    """The options with the masks and biases that they name."""
    create = {"mask": make_mask, "bias": make_bias}
    return {name: create[name](x, n_queries, n_keys) if name in create else x for name, x in options.items()}


@pytest.mark.parametrize(
    "compiled, backend, options, sizes",
    [
        *(("eager", backend, options, SIZES) for backend in TRAINABLE for options in OPTIONS),
        *(
            pytest.param("inductor", backend, options, [(3, 7), (1, 6)], marks=pytest.mark.slow)
            for backend, options in (("explicit", OPTIONS[2]), ("fused", OPTIONS[1]), ("fused", OPTIONS[3]))
        ),
    ],
    indirect=["compiled"],
    ids=str,
)
def test_compiled_attention_equals_the_uncompiled(compiled, backend, options, sizes):
    run = compiled(attention)
    for n_queries, n_keys in sizes:
        choices = created(options, n_queries, n_keys) | {"backend": backend}
        inputs = [x.requires_grad_() for x in make_qkv(n_queries, n_keys, v_size=5)]
        if "bias" in options:
            inputs.append(choices["bias"].requires_grad_())
        results = []
        for function in (run, attention):
            out = function(*inputs[:3], **choices)
            out = out if isinstance(out, tuple) else (out,)
            upstream = [torch.linspace(-1, 1, x.numel()).view_as(x) for x in out]
            results.append((*out, *torch.autograd.grad(out, inputs, upstream)))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected.double())


@pytest.mark.parametrize("n_dims", [2, 3])
def test_compiled_attention_without_heads_or_batch(compiled, n_dims):
    q, k, v = torch.randn(3, *(B,) * (n_dims - 2), 6, 8)
    out = compiled(attention)(q, k, v, causal=True, bias=make_bias("(T, S)", 6, 6))
    assert_close(out, attention(q, k, v, causal=True, bias=make_bias("(T, S)", 6, 6), backend="explicit").double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_attention_in_low_precision_with_a_float32_bias(compiled, dtype):
    q, k, v = (x.to(dtype) for x in make_qkv(6, 6, v_size=5))
    bias = make_bias("(H, T, S)", 6, 6)
    out = compiled(attention)(q, k, v, causal=True, bias=bias)
    assert out.dtype == dtype
    assert_close(out, attention(q, k, v, causal=True, bias=bias), roundings=8)


@pytest.mark.parametrize(
    "compiled, n_arguments, choices",
    [
        *(("eager", n, choices) for n in (1, 2, 3) for choices in MODULES),
        *(pytest.param("inductor", n, MODULES[0], marks=pytest.mark.slow) for n in (1, 3)),
    ],
    indirect=["compiled"],
    ids=str,
)
def test_the_compiled_module_equals_the_uncompiled(compiled, n_arguments, choices):
    """The compiled module also tells self-attention, where the key is the query tensor, from cross-attention."""
    attn = randomize(MultiHeadAttention(C, H, n_kv_heads=2, **choices))
    inputs = [torch.randn(B, 6, C) for _ in range(n_arguments)]
    run = compiled(attn)
    bias = make_bias("(H, T, S)", 6, 6)
    for arguments in (inputs, [inputs[0], inputs[0]]):
        assert_close(run(*arguments, bias=bias), attn(*arguments, bias=bias))
    assert not torch.equal(run(inputs[0]), attn(inputs[0], inputs[0].clone()))


@torch.no_grad()
def test_a_compiled_decoding_step_is_compiled_once_and_equals_the_full_pass(compiled):
    attn, x = randomize(MultiHeadAttention(C, H, n_kv_heads=2, v_head_dim=5, window=4)), torch.randn(B, 6, C)
    bias = torch.randn(H, 6, 8)
    cache, step = KVCache(1, B, 2, 8, C // H, v_head_dim=5), compiled(attn)
    outputs = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(6):
            row = bias[:, t : t + 1].clone()
            outputs.append(step(x[:, t : t + 1], bias=row, cache=cache.layer(0, torch.tensor([t]))))
    assert_close(torch.cat(outputs, dim=1), attn(x, bias=bias[..., :6]))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "flex"])
def test_no_value_is_read(backend, options):
    """Reading one would wait for a GPU; a tensor on the meta device has none."""
    for n_queries, n_keys in SIZES:
        choices = {
            name: x.to("meta") if isinstance(x, torch.Tensor) else x
            for name, x in created(options, n_queries, n_keys).items()
        }
        inputs = [x.to("meta").requires_grad_() for x in make_qkv(n_queries, n_keys, v_size=5)]
        out = attention(*inputs, backend=backend, **choices)
        if "need_weights" in options:
            out, weights = out
            assert weights.device.type == "meta" and weights.shape == (B, H, n_queries, n_keys)
        assert out.device.type == "meta" and out.shape == (B, H, n_queries, 5)
        out.sum().backward()
        assert all(x.grad.shape == x.shape for x in inputs)
