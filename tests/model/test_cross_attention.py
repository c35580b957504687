"""One, two or three arguments of `MultiHeadAttention`, against `torch.nn.MultiheadAttention` with kdim and vdim.

B batch, T queries, S keys, H query heads, C width of the query, K width of keys and values.
"""

import copy

import pytest
import torch

from tests.conftest import BACKENDS, BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize
from tests.model.test_multi_head_attention import torch_module_like
from tril.model.attention import MultiHeadAttention
from tril.model.masks import causal_mask

B, T, S, C, K, H = 2, 6, 9, 24, 10, 4


def make(**choices):
    return randomize(MultiHeadAttention(C, H, **choices))


def inputs_of(n_arguments, kv_dim, n_keys=S):
    shapes = [(B, T, C), (B, n_keys, kv_dim), (B, n_keys, kv_dim)][:n_arguments]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_keys", [S, 3, 1])
@pytest.mark.parametrize("n_arguments, kv_dim", [(1, C), (2, C), (3, C), (2, K), (3, K)])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_equals_torchs_multihead_attention(backend, n_arguments, kv_dim, n_keys, bias):
    """`causal` applies to self-attention only. All gradients are compared, of the parameters too."""
    attn = make(kv_dim=kv_dim, qkv_bias=bias, out_bias=bias, backend=backend)
    reference = torch_module_like(attn)
    inputs = inputs_of(n_arguments, kv_dim, n_keys)
    query, key, value = (inputs * 3)[:3] if n_arguments == 1 else (*inputs, inputs[-1])[:3]
    masked = ~causal_mask(T, T) if n_arguments == 1 else None  # in torch's mask True means masked
    out = attn(*inputs)
    expected, _ = reference(query, key, value, attn_mask=masked)
    assert_close(out, expected)
    again, weights = attn(*inputs, need_weights=True)
    assert_close(again, out)
    assert_close(weights, reference(query, key, value, attn_mask=masked, average_attn_weights=False)[1])

    upstream = torch.randn_like(out)
    out.backward(upstream)
    gradients = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    expected.backward(upstream)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert_close(gradient, x.grad)
    assert_close(attn.o_proj.weight.grad, reference.out_proj.weight.grad)
    if kv_dim == C:
        packed = torch.cat([p.weight.grad for p in (attn.q_proj, attn.k_proj, attn.v_proj)])
        assert_close(packed, reference.in_proj_weight.grad)
    else:
        assert_close(attn.k_proj.weight.grad, reference.k_proj_weight.grad)
        assert_close(attn.v_proj.weight.grad, reference.v_proj_weight.grad)


@pytest.mark.parametrize("kv_dim", [C, K])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_three_arguments_with_mask_and_bias_equal_torchs(backend, kv_dim):
    """Torch takes one tensor for both: -inf where masked, and the bias elsewhere, (B*H, T, S)."""
    attn, inputs = make(kv_dim=kv_dim, backend=backend), inputs_of(3, kv_dim)
    mask, bias = torch.rand(B, 1, T, S) < 0.6, torch.randn(H, T, S)
    mask[..., 0] = True  # torch gives NaN for a fully masked row
    both = bias.expand(B, H, T, S).masked_fill(~mask, -torch.inf)
    expected, weights = torch_module_like(attn)(*inputs, attn_mask=both.flatten(0, 1), average_attn_weights=False)
    assert_close(attn(*inputs, mask=mask, bias=bias), expected)
    assert_close(attn(*inputs, bias=both), expected)
    assert_close(attn(*inputs, mask=mask, bias=bias, need_weights=True)[1], weights)


@pytest.mark.parametrize("choices", [{}, {"window": 2}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_the_query_tensor_as_key_is_self_attention_and_an_equal_tensor_is_cross_attention(backend, choices):
    attn, x = make(backend=backend, **choices), torch.randn(B, T, C)
    causal = attn(x)
    assert torch.equal(attn(x, x), causal) and torch.equal(attn(x, x, x), causal)
    everything = copy.deepcopy(attn)
    everything.causal, everything.window = False, None
    assert torch.equal(attn(x, x.clone()), everything(x))
    assert not torch.equal(attn(x, x.clone()), causal)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_self_attention_with_other_values_stays_causal(backend):
    attn, x, value = make(backend=backend, window=3), torch.randn(B, T, C), torch.randn(B, T, C)
    masked = ~causal_mask(T, T, window=3)
    expected, _ = torch_module_like(attn)(x, x, value, attn_mask=masked)
    assert_close(attn(x, x, value), expected)
    assert torch.equal(attn(x, value=value), attn(x, x, value))


@pytest.mark.parametrize("n_arguments", [2, 3])
@torch.no_grad()
def test_each_argument_has_its_own_projection(n_arguments):
    """A change of the value changes no weight; a change of the key changes no projected value."""
    attn, inputs = make(kv_dim=K), inputs_of(3, K)
    out, weights = attn(*inputs, need_weights=True)
    other = [*inputs[:2], torch.randn(B, S, K)]
    assert torch.equal(attn(*other, need_weights=True)[1], weights) and not torch.equal(attn(*other), out)
    assert torch.equal(attn(inputs[0], inputs[1]), attn(inputs[0], inputs[1], inputs[1]))


def test_keys_and_values_of_different_lengths_are_refused_in_one_line():
    for key, value in [((B, S, C), (B, S + 1, C)), ((B, S, C), (B, 1, C)), ((B, S, C), (1, S, C)), ((1, S, C),) * 2]:
        with pytest.raises(ValueError, match="must be") as error:
            make()(torch.randn(B, T, C), torch.randn(key), torch.randn(value))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "choices, widths",
    [
        ({}, (C + 1, C + 1, C + 1)),
        ({}, (C, K, K)),
        ({"kv_dim": K}, (C, C, C)),
        ({"kv_dim": K}, (K, K, K)),
        ({"kv_dim": K}, (C, K, C)),
        ({"kv_dim": K}, (C, C, K)),
    ],
)
def test_wrong_widths_are_refused_in_one_line(choices, widths):
    inputs = [torch.randn(B, T, width) for width in widths]
    with pytest.raises(ValueError) as error:
        make(**choices)(*inputs)
    kv_dim = choices.get("kv_dim", C)
    shapes = "query {}, key {}, value {}".format(*((B, T, width) for width in widths))
    expected = f"(B, T, {C}), (B, S, {kv_dim}), (B, S, {kv_dim})"
    assert str(error.value) == f"{shapes} must be {expected}"


def test_self_attention_needs_keys_of_the_width_of_the_query():
    with pytest.raises(ValueError, match=r"value \(2, 6, 24\) must be .*\(B, S, 10\)$"):
        make(kv_dim=K)(torch.randn(B, T, C))


@pytest.mark.parametrize("choices", [{"n_heads": 1}, {"n_heads": 4}, {"n_heads": 4, "out_proj": False}], ids=str)
@pytest.mark.parametrize("shape", [(T, C), (C,), (B, 1, T, C)])
def test_inputs_without_a_batch_or_with_heads_are_refused_in_one_line(shape, choices):
    attn = MultiHeadAttention(C, **choices)
    with pytest.raises(ValueError, match=r"must be \(B, T, 24\), \(B, S, 24\)") as error:
        attn(torch.randn(shape))
    assert f"query {shape}" in str(error.value) and "\n" not in str(error.value)
    if len(shape) > 1:
        with pytest.raises(ValueError, match="must be") as error:
            attn(torch.randn(B, T, C), torch.randn(shape))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["(S,)", "(T, S)", "(H, T, S)", "(B, 1, 1, S)", "(B, 1, T, S)", "(T, 1)", "()"])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_mask_and_bias_with_last_only(backend, cross, kind):
    attn, x = make(backend=backend, n_kv_heads=2, v_head_dim=5), torch.randn(B, T, C)
    context = torch.randn(B, S, C) if cross else None
    sizes = {"B": B, "H": H, "T": T, "S": S if cross else T}
    shape = [sizes.get(c) or int(c) for c in kind.strip("()").replace(",", " ").split()]
    options = {"mask": torch.rand(shape) < 0.7, "bias": torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -1e9)}
    for names in (["mask"], ["bias"], ["mask", "bias"]):
        given = {name: options[name] for name in names}
        assert_close(attn(x, context, last_only=True, **given), attn(x, context, **given)[:, -1:])
    last, weights = attn(x, context, last_only=True, need_weights=True, **options)
    assert_close(weights, attn(x, context, need_weights=True, **options)[1][:, :, -1:])
    assert last.shape == (B, 1, C)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_fully_masked_context_gives_the_bias_of_the_output_alone(backend):
    attn, x, context = make(backend=backend, out_bias=True), torch.randn(B, T, C), torch.randn(B, S, C)
    out, weights = attn(x, context, mask=torch.zeros(B, 1, 1, S, dtype=torch.bool), need_weights=True)
    assert torch.equal(out, attn.o_proj.bias.expand(B, T, C)) and not weights.any()
