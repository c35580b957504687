"""`MultiHeadAttention` with sizes of its own for values, outputs and inputs, against one small matrix per head.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, D_v size of a value, C width, K width of
keys and values, O width of the output.
"""

import contextlib
import copy
import itertools
import math

import pytest
import torch
from torch import nn

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, randomize
from tril.model.attention import MultiHeadAttention
from tril.model.kv_cache import KVCache
from tril.model.masks import causal_mask
from tril.model.rope import rope_table

B, T, S, C, K, H = 2, 6, 9, 24, 10, 4
SIZES = [  # D is 6 by default
    {"v_head_dim": 3},
    {"v_head_dim": 11, "out_dim": 5},
    {"out_dim": 32, "n_kv_heads": 2},
    {"out_proj": False},
    {"out_proj": False, "v_head_dim": 2, "n_kv_heads": 1},
    {"kv_dim": K, "v_head_dim": 7, "out_dim": 13, "n_kv_heads": 2, "head_dim": 4, "qkv_bias": True, "out_bias": True},
]


def make(**choices):
    return randomize(MultiHeadAttention(C, H, **choices))


def textbook(attn, x, source, scores_bias):
    """Concat(head_1 ... head_H) W_O (Vaswani et al. 2017, section 3.2.2), one matrix per head, in float64.

    Args:
        scores_bias: (B or 1, H or 1, T, S), -inf where masked.
    """
    attn, x, source = copy.deepcopy(attn).double(), x.double(), source.double()
    group = attn.n_heads // attn.n_kv_heads
    heads = []
    for h in range(attn.n_heads):
        q, k, v = (
            inputs @ weight.T + offset
            for inputs, weight, offset in (
                (x, *rows_of(attn.q_proj, h, attn.head_dim)),
                (source, *rows_of(attn.k_proj, h // group, attn.head_dim)),
                (source, *rows_of(attn.v_proj, h // group, attn.v_head_dim)),
            )
        )
        q, k = normalized(q, attn.q_norm), normalized(k, attn.k_norm)
        scores = q @ k.mT / math.sqrt(attn.head_dim)  # (B, T, S)
        scores = scores + scores_bias.double().expand(-1, attn.n_heads, -1, -1)[:, h]
        heads.append(scores.softmax(-1) @ v)
    out = torch.cat(heads, dim=-1)
    if isinstance(attn.o_proj, nn.Linear):
        out = out @ attn.o_proj.weight.T + (0.0 if attn.o_proj.bias is None else attn.o_proj.bias)
    return out


def rows_of(linear, head, size):
    rows = slice(head * size, (head + 1) * size)
    return linear.weight[rows], 0.0 if linear.bias is None else linear.bias[rows]


def normalized(x, norm):
    """RMSNorm, or layer norm without a bias, from the definition; eps are those that torch documents."""
    if isinstance(norm, nn.Identity):
        return x
    centered = x - x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else x
    eps = 1e-5 if isinstance(norm, nn.LayerNorm) else torch.finfo(torch.float32).eps
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight


def future(n_queries=T):
    """-inf where the causal mask hides a key."""
    return causal_mask(n_queries, n_queries).double().log()[None, None]


@pytest.mark.parametrize("qk_norm", ["none", "rmsnorm", "layernorm"])
@pytest.mark.parametrize("choices", SIZES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
def test_equals_one_small_matrix_per_head(backend, choices, qk_norm):
    attn, x, context = make(backend=backend, qk_norm=qk_norm, **choices), torch.randn(B, T, C), torch.randn(B, S, C)
    bias = torch.randn(H, T, S).masked_fill(torch.rand(H, T, S) < 0.2, -torch.inf)
    bias[..., 0] = 0.0
    if attn.k_proj.in_features == K:
        context = context[..., :K]
    with torch.no_grad() if backend == "flex" else contextlib.nullcontext():
        out = attn(x, context, bias=bias)
        expected = textbook(attn, x, context, bias[None])
        assert_close(out, expected)
        width = H * attn.v_head_dim if choices.get("out_proj") is False else choices.get("out_dim", C)
        assert out.shape == (B, T, width)
        if attn.k_proj.in_features == C:
            assert_close(attn(x), textbook(attn, x, x, future()))
    if backend == "flex":
        return
    parameters, upstream = tuple(attn.parameters()), torch.randn_like(out)
    gradients = torch.autograd.grad(out, parameters, upstream)
    double = copy.deepcopy(attn).double()
    exact = torch.autograd.grad(double(x.double(), context.double(), bias=bias), tuple(double.parameters()), upstream)
    for actual, wanted in zip(gradients, exact, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("backend", TRAINABLE)
def test_without_output_projection_the_result_is_the_concatenated_heads(backend):
    full, x = make(backend=backend, n_kv_heads=2, v_head_dim=5), torch.randn(B, T, C)
    heads = MultiHeadAttention(C, H, backend=backend, n_kv_heads=2, v_head_dim=5, out_proj=False)
    heads.load_state_dict({name: p for name, p in full.state_dict().items() if not name.startswith("o_proj")})
    assert isinstance(heads.o_proj, nn.Identity)
    assert torch.equal(full.o_proj(heads(x)), full(x))
    for h in range(H):  # head h is columns h*D_v ... (h+1)*D_v
        gated = heads(x, head_gate=torch.eye(H)[h])
        assert torch.equal(gated[..., h * 5 : (h + 1) * 5], heads(x)[..., h * 5 : (h + 1) * 5])
        assert gated.count_nonzero() == B * T * 5


def test_parameters_have_the_documented_shapes():
    attn = MultiHeadAttention(
        24, 4, n_kv_heads=2, head_dim=5, v_head_dim=3, kv_dim=10, out_dim=7, qkv_bias=True, out_bias=True, qk_norm=True
    )
    assert {name: tuple(p.shape) for name, p in attn.named_parameters()} == {
        "q_proj.weight": (20, 24),
        "q_proj.bias": (20,),
        "k_proj.weight": (10, 10),
        "k_proj.bias": (10,),
        "v_proj.weight": (6, 10),
        "v_proj.bias": (6,),
        "o_proj.weight": (7, 12),
        "o_proj.bias": (7,),
        "q_norm.weight": (5,),
        "k_norm.weight": (5,),
    }


@pytest.mark.parametrize("old, new", [(True, "rmsnorm"), (False, "none")])
def test_the_booleans_of_earlier_versions_are_the_same_module(old, new):
    before = make(qk_norm=old, qkv_bias=True, out_bias=True)
    after, x = MultiHeadAttention(C, H, qk_norm=new, qkv_bias=True, out_bias=True), torch.randn(B, T, C)
    assert list(before.state_dict()) == [
        *("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"),
        *("o_proj.weight", "o_proj.bias"),
        *(("q_norm.weight", "k_norm.weight") if old else ()),
    ]
    after.load_state_dict(before.state_dict())
    assert torch.equal(after(x), before(x))
    assert list(MultiHeadAttention(C, H).state_dict()) == [f"{name}_proj.weight" for name in "qkvo"]


def test_the_norms_differ_and_layernorm_removes_the_mean():
    x = torch.randn(B, T, C)
    rms, layer = make(qk_norm="rmsnorm"), make(qk_norm="layernorm", qkv_bias=True)
    assert isinstance(rms.q_norm, nn.RMSNorm) and isinstance(layer.q_norm, nn.LayerNorm)
    before = layer(x)
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            projection.bias.add_(3.0)  # the same number for all entries of a head
    assert_close(layer(x), before, roundings=256)  # a mean of 3 costs digits
    weights = rms.state_dict()
    layer = MultiHeadAttention(C, H, qk_norm="layernorm")
    layer.load_state_dict(weights)  # both have a gain over D
    assert (layer(x) - rms(x)).abs().max() > 0.01


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norm_eps_reaches_both_norms(kind):
    """Where x is 0, an eps of e changes nothing; where the mean square is m, x is divided by sqrt(m + e)."""
    attn, x = make(qk_norm=kind, norm_eps=4.0), torch.randn(B, T, C)
    assert (attn.q_norm.eps, attn.k_norm.eps) == (4.0, 4.0)
    out = attn(x, need_weights=True)[1]
    q, k = (p(x).unflatten(-1, (H, -1)).transpose(1, 2).double() for p in (attn.q_proj, attn.k_proj))
    if kind == "layernorm":
        q, k = (y - y.mean(-1, keepdim=True) for y in (q, k))
    q, k = (y / (y.square().mean(-1, keepdim=True) + 4).sqrt() for y in (q, k))
    scores = (q * attn.q_norm.weight) @ (k * attn.k_norm.weight).mT / math.sqrt(C // H)
    assert_close(out, (scores + future()).softmax(-1))


@pytest.mark.parametrize("position", ["int", "tensor"])
@pytest.mark.parametrize("choices", [{"v_head_dim": 3}, {"v_head_dim": 9, "n_kv_heads": 2, "window": 3}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_decoding_with_mask_bias_and_values_of_another_size_equals_the_full_pass(backend, choices, position):
    """The bias depends on query and key, so that a wrong row or column of it changes the result."""
    attn, x = make(backend=backend, qk_norm="layernorm", out_proj=False, **choices), torch.randn(B, T, C)
    bias, mask = torch.randn(H, T, T), torch.rand(B, 1, T, T) < 0.8
    rope = rope_table(T, C // H)
    full = attn(x, mask=mask, bias=bias, rope=rope)
    capacity = T + 2
    cache = KVCache(1, B, attn.n_kv_heads, capacity, attn.head_dim, v_head_dim=attn.v_head_dim)
    assert cache.keys[0].shape[-1] == attn.head_dim and cache.values[0].shape[-1] == attn.v_head_dim
    outputs = []
    for t, end in itertools.pairwise([0, 2, 3, 4, 5, 6]):
        at_tensor = position == "tensor" and end - t == 1
        layer = cache.layer(0, torch.tensor([t]) if at_tensor else None)
        rows, n_keys = slice(t, end), capacity if at_tensor else end
        padded = [nn.functional.pad(y[..., rows, :], (0, capacity - T)) for y in (mask, bias)]
        options = {"mask": padded[0][..., :n_keys], "bias": padded[1][..., :n_keys]}
        outputs.append(attn(x[:, rows], rope=tuple(table[rows] for table in rope), cache=layer, **options))
        cache.advance(end - t)
    assert_close(torch.cat(outputs, dim=1), full)


@pytest.mark.parametrize("shape", [(H,), (B, H)])
@pytest.mark.parametrize("backend", TRAINABLE)
def test_gates_scale_heads_with_values_of_another_size(backend, shape):
    attn, x = make(backend=backend, v_head_dim=5, n_kv_heads=2, out_proj=False), torch.randn(B, T, C)
    gate = torch.rand(shape)
    factor = gate.expand(B, H).repeat_interleave(5, dim=1)[:, None]  # (B, 1, H*D_v)
    assert_close(attn(x, head_gate=gate), attn(x) * factor, roundings=1)
