"""`MultiHeadAttention` against `torch.nn.MultiheadAttention`, the textbook formula, and variants of itself.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width.
"""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn

from tests.conftest import BACKENDS, BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize
from tril.model.attention import MultiHeadAttention, causal_mask
from tril.model.rope import rope_table

B, T, S, C, H = 2, 6, 9, 24, 4


def make(**choices):
    return randomize(MultiHeadAttention(C, H, **choices))


def gradients_if_supported(backend):
    return torch.no_grad() if backend == "flex" else contextlib.nullcontext()


def copy_of(attn, **choices):
    """A module with the same weights and other arguments."""
    other = MultiHeadAttention(C, H, **choices)
    other.load_state_dict(attn.state_dict())
    return other


def torch_module_like(attn):
    """A `torch.nn.MultiheadAttention` with the weights of `attn`."""
    kv_dim, bias = attn.k_proj.in_features, attn.q_proj.bias is not None
    reference = nn.MultiheadAttention(C, H, bias=bias, kdim=kv_dim, vdim=kv_dim, batch_first=True)
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    with torch.no_grad():
        if reference.in_proj_weight is None:  # kdim is not C: three matrices
            for name, projection in zip("qkv", projections, strict=True):
                getattr(reference, f"{name}_proj_weight").copy_(projection.weight)
        else:
            reference.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        reference.out_proj.weight.copy_(attn.o_proj.weight)
        if bias:
            reference.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
            reference.out_proj.bias.copy_(attn.o_proj.bias)
    return reference


def textbook(attn, x, source, visible):
    """One small weight matrix per head (Vaswani et al. 2017, section 3.2.2), without normalization, in float64."""
    attn = copy.deepcopy(attn).double()
    size, group = attn.head_dim, attn.n_heads // attn.n_kv_heads
    heads = []
    for h in range(attn.n_heads):
        rows, shared = slice(h * size, (h + 1) * size), slice(h // group * size, (h // group + 1) * size)
        w_q, w_k, w_v = attn.q_proj.weight[rows].T, attn.k_proj.weight[shared].T, attn.v_proj.weight[shared].T  # (C, D)
        b_q, b_k, b_v = (0.0 if p.bias is None else p.bias for p in (attn.q_proj, attn.k_proj, attn.v_proj))
        if attn.q_proj.bias is not None:
            b_q, b_k, b_v = b_q[rows], b_k[shared], b_v[shared]
        q, k, v = x.double() @ w_q + b_q, source.double() @ w_k + b_k, source.double() @ w_v + b_v
        scores = (q @ k.mT / math.sqrt(size)).masked_fill(~visible, -math.inf)  # (B, T, S)
        heads.append(scores.softmax(-1) @ v)
    out = torch.cat(heads, dim=-1) @ attn.o_proj.weight.T  # Concat(head_1 ... head_H) W_O
    return out if attn.o_proj.bias is None else out + attn.o_proj.bias


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_equals_torchs_multihead_attention(backend, cross, causal, bias):
    attn = make(causal=causal, qkv_bias=bias, out_bias=bias, backend=backend)
    reference = torch_module_like(attn)
    x = torch.randn(B, T, C, requires_grad=True)
    context = torch.randn(B, S, C, requires_grad=True) if cross else None
    source = context if cross else x
    # In torch's mask True means masked. Cross-attention sees the whole context, whatever `causal` is.
    masked = torch.ones(T, T).triu(1).bool() if causal and not cross else None

    with gradients_if_supported(backend):
        out, weights = attn(x, context, need_weights=True)
        expected, expected_weights = reference(x, source, source, attn_mask=masked, average_attn_weights=False)
    assert_close(out, expected)
    assert_close(weights, expected_weights)
    if backend == "flex":
        return
    inputs, upstream = (x, context) if cross else (x,), torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, upstream)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, inputs, upstream), strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("choices", [{}, {"window": 2}, {"causal": False}], ids=str)
@pytest.mark.parametrize("n_keys", [1, 3, S])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_cross_attention_sees_the_whole_context(backend, n_keys, choices):
    """`causal` and `window` of the module do not apply: positions of x and of the context are not comparable."""
    attn, x, context = make(backend=backend, **choices), torch.randn(B, T, C), torch.randn(B, n_keys, C)
    out, weights = attn(x, context, need_weights=True)
    assert (weights > 0).all() and (out != 0).any(-1).all()  # also where the context is shorter than x
    expected, expected_weights = torch_module_like(attn)(x, context, context, average_attn_weights=False)
    assert_close(out, expected)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("choices", [{}, {"window": 2}, {"causal": False}], ids=str)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_a_mask_hides_part_of_the_context(backend, choices):
    attn, x, context = make(backend=backend, **choices), torch.randn(B, T, C), torch.randn(B, S, C)
    mask = torch.arange(S) < torch.tensor([S, 4])[:, None]  # (B, S), True = may attend
    out, weights = attn(x, context, mask=mask[:, None, None], need_weights=True)
    expected, expected_weights = torch_module_like(attn)(
        x, context, context, key_padding_mask=~mask, average_attn_weights=False
    )
    assert_close(out, expected)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("n_kv_heads, head_dim", [(4, None), (2, None), (1, 6), (2, 5), (4, 16)])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_equals_one_small_matrix_per_head(backend, n_kv_heads, head_dim):
    attn = make(n_kv_heads=n_kv_heads, head_dim=head_dim, qkv_bias=True, out_bias=True, window=3, backend=backend)
    x = torch.randn(B, T, C)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    with torch.no_grad():
        assert_close(attn(x), textbook(attn, x, x, (distance >= 0) & (distance < 3)))


def test_projections_have_the_documented_shapes():
    attn = MultiHeadAttention(24, 4, n_kv_heads=2, head_dim=5, qkv_bias=True)
    shapes = {name: tuple(p.shape) for name, p in attn.named_parameters()}
    assert shapes == {
        "q_proj.weight": (20, 24),
        "k_proj.weight": (10, 24),
        "v_proj.weight": (10, 24),
        "q_proj.bias": (20,),
        "k_proj.bias": (10,),
        "v_proj.bias": (10,),
        "o_proj.weight": (24, 20),
    }


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_grouped_queries_equal_full_heads_with_repeated_weights(backend, n_kv_heads):
    grouped = make(n_kv_heads=n_kv_heads, qkv_bias=True, backend=backend)
    weights = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        per_head = weights[name].unflatten(0, (n_kv_heads, -1))
        weights[name] = per_head.repeat_interleave(H // n_kv_heads, dim=0).flatten(0, 1)
    full = MultiHeadAttention(C, H, qkv_bias=True, backend=backend)
    full.load_state_dict(weights)
    x = torch.randn(B, T, C)
    with torch.no_grad():
        assert_close(grouped(x), full(x))


def test_each_head_is_rms_normalized_and_then_rotated():
    attn = make(n_kv_heads=2, qk_norm=True)
    x = torch.randn(B, T, C)
    cos, sin = rope_table(T, C // H)
    _, weights = attn(x, rope=(cos, sin), need_weights=True)
    size = C // H

    def normalized_and_rotated(x, gain):
        x = x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * gain
        a, b = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    for h in range(H):
        q = x @ attn.q_proj.weight[h * size : (h + 1) * size].T
        k = x @ attn.k_proj.weight[h // 2 * size : (h // 2 + 1) * size].T
        scores = (
            normalized_and_rotated(q, attn.q_norm.weight)
            @ normalized_and_rotated(k, attn.k_norm.weight).mT
            / math.sqrt(size)
        )
        assert_close(weights[:, h], scores.masked_fill(~causal_mask(T, T), -math.inf).softmax(-1))


def test_qk_norm_makes_weights_independent_of_the_scale_of_q_and_k():
    attn, x = make(qk_norm=True), torch.randn(B, T, C)
    before = attn(x)
    with torch.no_grad():
        attn.q_proj.weight.mul_(8)
        attn.k_proj.weight.mul_(4)
    assert_close(attn(x), before)


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@pytest.mark.parametrize("head", range(H))
def test_gate_zero_removes_one_head(backend, head):
    attn, x = make(n_kv_heads=2, out_bias=True, backend=backend), torch.randn(B, T, C)
    gate = torch.ones(H)
    gate[head] = 0.0
    size = C // H
    with torch.no_grad():
        ungated, gated = attn(x), attn(x, head_gate=gate)
        attn.o_proj.weight[:, head * size : (head + 1) * size] = 0.0  # the columns of W_O that read this head
        assert_close(gated, attn(x))
        assert (gated - ungated).abs().max() > 0.01


def test_gate_scales_heads_row_by_row():
    attn, x = make(), torch.randn(B, T, C)
    gate = torch.rand(B, H)
    out = attn(x, head_gate=gate)
    for row in range(B):
        assert_close(out[row], attn(x, head_gate=gate[row])[row])
        scaled = copy_of(attn)
        with torch.no_grad():
            scaled.o_proj.weight.mul_(gate[row].repeat_interleave(C // H))
        assert_close(out[row], scaled(x)[row])
    assert torch.equal(attn(x, head_gate=torch.ones(H)), attn(x))


def test_gate_receives_a_gradient():
    attn, x = make(), torch.randn(B, T, C)
    gate = torch.ones(H, requires_grad=True)
    attn(x, head_gate=gate).sum().backward()
    # The output is linear in the gate, so the derivative for a head is the output minus the output without it.
    contribution = [(attn(x) - attn(x, head_gate=1 - torch.eye(H)[h])).sum() for h in range(H)]
    assert_close(gate.grad, torch.stack(contribution), roundings=640)  # a difference of sums over 288 outputs


@pytest.mark.parametrize("shape", [(), (1,), (3,), (H, 1), (1, H), (B + 1, H), (B, H, 1, 1)])
def test_gate_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="head_gate of shape .*must be"):
        make()(torch.randn(B, T, C), head_gate=torch.ones(shape))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cross", [False, True])
def test_returned_weights_give_the_output(backend, cross):
    attn = make(n_kv_heads=2, window=4, backend=backend)
    x, context = torch.randn(B, T, C), torch.randn(B, S, C) if cross else None
    n_keys = S if cross else T
    mask = torch.rand(B, 1, T, n_keys) < 0.6
    mask[0, 0, 2] = False
    with torch.no_grad():
        out, weights = attn(x, context, mask=mask, need_weights=True)
        without = attn(x, context, mask=mask)
        assert_close(out, without)
        if backend == "explicit":  # it computes the weights of all backends
            assert torch.equal(out, without)
        v = attn.v_proj(x if context is None else context).unflatten(-1, (2, -1)).transpose(1, 2)  # (B, G, S, D)
        heads = weights @ v.repeat_interleave(2, dim=1)
        assert_close(out, heads.transpose(1, 2).flatten(2) @ attn.o_proj.weight.T)
    assert weights.shape == (B, H, T, n_keys) and weights.dtype == torch.float32
    visible = (mask if cross else mask & causal_mask(T, T, window=4)).expand_as(weights)
    assert torch.equal(weights > 0, visible)
    assert_close(weights.sum(-1), visible.any(-1).float())
    assert not weights[0, :, 2].any()


@pytest.mark.parametrize("backend", TRAINABLE)
def test_attention_dropout_acts_in_training_only(backend):
    attn, x = make(attn_dropout=0.5, backend=backend), torch.randn(B, T, C)
    plain = copy_of(attn, backend=backend)(x)
    assert torch.equal(attn.eval()(x), plain)
    attn.train()
    assert not torch.equal(attn(x), plain)
    _, weights = attn(x, need_weights=True)  # after dropout
    assert (weights == 0).tril().any() and not torch.equal(weights, attn(x, need_weights=True)[1])
    assert_close(attn.eval()(x, need_weights=True)[1].sum(-1), torch.ones(B, H, T))


@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_residual_dropout_acts_in_training_only(backend):
    attn, x = make(resid_dropout=0.25, out_bias=True, backend=backend), torch.randn(B, T, C)
    with torch.no_grad():
        plain = attn.eval()(x)
        assert torch.equal(plain, copy_of(attn, out_bias=True, backend=backend)(x))
        dropped = attn.train()(x)
    kept = dropped != 0
    assert_close(dropped[kept], plain[kept] / 0.75)
    n = kept.numel()
    assert abs(kept.sum().item() / n - 0.75) < 5 * math.sqrt(0.25 * 0.75 / n)  # five standard deviations


def test_backends_share_weights_and_gradients():
    x, upstream = torch.randn(B, T, C), torch.randn(B, T, C)
    attn = make(n_kv_heads=2, qk_norm=True, qkv_bias=True, window=4)
    gradients = []
    for backend in TRAINABLE:
        attn.backend = backend
        gradients.append(torch.autograd.grad(attn(x, rope=rope_table(T, C // H)), tuple(attn.parameters()), upstream))
    for other in gradients[1:]:
        for actual, expected in zip(other, gradients[0], strict=True):
            assert_close(actual, expected)
