"""Attention against a loop in float64, against torch.nn.MultiheadAttention, and against numbers that texts print."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import layer_norm, rms_norm
from torch.testing import assert_close

from tests.contract.printed_tables import PRINTED
from tril.model import MultiHeadAttention, causal_mask
from tril.model.attention import attention, attention_weights

NORMS = {"none": lambda x, size: x, "rmsnorm": rms_norm, "layernorm": layer_norm}
CHOICES = {  # hypothesis draws one of each
    "backend": ["explicit", "stacked", "fused"],
    "rule": [{"causal": False}, {"causal": True}, *({"causal": True, "window": n} for n in (1, 2, 4))],
    "mask": [None, None, "S", "TS", "11T1", "B11S", "BHTS"],  # its shape
    "mask_dtype": [torch.bool, torch.int64, torch.uint8],
    "bias": [None, None, "S", "TS", "1HTS", "BHTS"],
    # the dtype, the largest absolute difference, and the relative one: a unit in the last place of bfloat16
    "precision": [(torch.float64, 1e-12, 0), (torch.float32, 2e-6, 0), (torch.bfloat16, 5e-2, 2**-7)],
    "heads": [(1, 1), (2, 1), (2, 2), (6, 2)],
    "sizes": [{"n_kv_heads": 1, "v_head_dim": 3}, {"n_kv_heads": 2, "out_dim": 5}, {"head_dim": 4, "out_proj": False}],
    "norm": list(NORMS),
    "gate": [(4,), (2, 4)],
    **{"t": range(1, 6), "s": range(1, 7), "d": range(1, 5), "seed": range(1000)},
}
CASES = st.builds(SimpleNamespace, **{name: st.sampled_from(choices) for name, choices in CHOICES.items()})
DRAWN = settings(max_examples=250, derandomize=True, deadline=None, database=None)


def loop(q, k, v, visible, bias):
    """softmax(q k^T / sqrt(D) + bias) v and its weights: each query of (B, H, T, D) over the keys that it may see."""
    out, weights = (q.new_zeros(*q.shape[:3], size) + 0 * q.sum() for size in (v.shape[3], k.shape[2]))
    for b, h, t in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        g, keys = h * k.shape[1] // q.shape[1], visible[b, h, t]
        exponentials = (k[b, g, keys] @ q[b, h, t] / math.sqrt(q.shape[3]) + bias[b, h, t, keys]).exp()
        weights[b, h, t, keys] = exponentials / exponentials.sum()
        out[b, h, t] = weights[b, h, t, keys] @ v[b, g, keys]
    return out, weights


def masking(case, *shape):
    """The mask and the bias of a call; for scores of (B, H, T, S), which keys are visible and what is added."""
    t, s = shape[2:]
    causal, window = case.rule["causal"], case.rule.get("window")  # the last query is at the position of the last key
    rule = [[not causal or 0 <= i + s - t - j < (window or s) for j in range(s)] for i in range(t)]
    assert not causal or causal_mask(t, s, window=window).tolist() == rule
    letters = dict(zip("BHTS1", (*shape, 1), strict=True))
    mask, bias = (torch.rand([letters[x] for x in sizes or ""]).double() for sizes in (case.mask, case.bias))
    mask, hidden = (mask < 0.6) | (case.mask is None), (bias < 0.2) & (case.bias is not None)
    bias = bias.masked_fill(hidden, -math.inf).requires_grad_()
    visible = (torch.tensor(rule) & mask & ~hidden).expand(shape)
    return case.mask and mask.to(case.mask_dtype), case.bias and bias, visible, bias.expand(shape)


@DRAWN
@given(CASES)
def test_a_call_computes_what_a_loop_computes(case):
    torch.manual_seed(case.seed)
    (dtype, atol, rtol), (h, g) = case.precision, case.heads
    wide = torch.promote_types(dtype, torch.float32)
    sizes = (h, case.t, case.d), (g, case.s, case.d), (g, case.s, 3)
    inputs = [torch.randn(2, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    mask, bias, visible, added = masking(case, 2, h, case.t, case.s)
    q, k, v = (x.to(dtype) for x in inputs)
    expected, weights = loop(q.double(), k.double(), v.double(), visible, added)
    if bias is None:
        assert_close(attention_weights(q, k, visible).double(), weights, rtol=rtol, atol=atol)
    else:
        inputs, bias = [*inputs, bias], bias.to(wide)
    options = {"mask": mask, "bias": bias, "backend": case.backend, **case.rule}
    out, (_, actual) = attention(q, k, v, **options), attention(q, k, v, **options, need_weights=True)
    assert (out.dtype, actual.dtype) == (dtype, wide) and ((weights > 0) | (actual == 0)).all()
    actual, expected = torch.cat([out, actual], -1).double(), torch.cat([expected, weights], -1)
    assert_close(actual, expected, rtol=rtol, atol=atol)
    gradient = torch.randn_like(expected)
    choice = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    gradients = [torch.autograd.grad(y, inputs, gradient, **choice) for y in (actual, expected)]
    assert_close(*gradients, rtol=rtol, atol=atol)


@torch.no_grad()
@DRAWN
@given(CASES)
def test_the_module_attends_with_the_heads_of_its_projections(case):
    torch.manual_seed(case.seed)
    options = {**case.sizes, **case.rule, "qk_norm": case.norm, "backend": case.backend}
    module, x = MultiHeadAttention(8, 4, **options).double(), torch.randn(2, case.t, 8).double()
    mask, bias, visible, added = masking(case, 2, 4, case.t, case.t)
    gate, angles = torch.randn(case.gate).double(), torch.randn(case.t, module.head_dim // 2).double()
    layers = (module.q_proj, 4), (module.k_proj, module.n_kv_heads), (module.v_proj, module.n_kv_heads)
    q, k, v = (layer(x).unflatten(-1, (n, -1)).transpose(1, 2) for layer, n in layers)  # head h: from h D to (h + 1) D
    q, k = (torch.complex(*NORMS[case.norm](y, y.shape[3:]).chunk(2, -1)) for y in (q, k))  # pairs i, i + D / 2
    q, k = (torch.view_as_real(y * torch.polar(torch.ones_like(angles), angles)).mT.flatten(3) for y in (q, k))
    out, weights = loop(q, k, v, visible, added)
    expected = module.o_proj((gate.view(-1, 4, 1, 1) * out).transpose(1, 2).flatten(2))
    call = {"mask": mask, "bias": bias, "head_gate": gate, "rope": (angles.cos(), angles.sin())}
    actual = (module(x, **call), *module(x, **call, need_weights=True), module(x, **call, last_only=True))
    assert_close(actual, (expected, expected, weights, expected[:, -1:]), rtol=0, atol=1e-9)


@pytest.mark.parametrize("cross", [False, True])
def test_the_module_equals_that_of_torch_with_the_same_weights(cross):
    width = 8 if cross else 12
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, kdim=width, vdim=width)
    ours = MultiHeadAttention(12, 3, qkv_bias=True, out_bias=True, kv_dim=width)
    torch.nn.init.normal_(theirs.in_proj_bias)
    weights = [getattr(theirs, f"{x}_proj_weight") for x in "qkv"] if cross else theirs.in_proj_weight.chunk(3)
    for layer, weight, bias in zip("qkv", weights, theirs.in_proj_bias.chunk(3), strict=True):
        getattr(ours, f"{layer}_proj").load_state_dict({"weight": weight, "bias": bias})
    ours.o_proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(2, 5, 12)
    key, value = torch.randn(2, 2, 7, 8) if cross else (x, x)  # all of another sequence is visible
    hidden = None if cross else torch.ones(5, 5).triu(1).bool()
    expected = theirs(x, key, value, attn_mask=hidden, average_attn_weights=False)
    assert_close(ours(x, key, value, need_weights=True), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", CHOICES["backend"][:3])
def test_dropout_sets_a_weight_to_zero_or_divides_it_by_the_share_that_stays(backend):
    q, k, v = torch.randn(1, 2, 40, 4), torch.randn(1, 2, 40, 4), torch.eye(40).expand(1, 2, 40, 40)
    out = attention(q, k, v, dropout_p=0.25, backend=backend)  # of these values it is the weights
    assert_close(out[out != 0], (attention_weights(q, k) / 0.75)[out != 0])
    assert abs((out == 0).float().mean() - 0.25) < 0.04  # five standard deviations


WRONG = [  # what the message names, and the call for x of (2, 4, 3, 8)
    ("window=2", lambda x: attention(x, x, x, window=2)),
    ("window=0", lambda x: causal_mask(3, 3, window=0)),
    ("backend='flash'", lambda x: MultiHeadAttention(8, 4, backend="flash")),
    ("dropout_p=1.0", lambda x: attention(x, x, x, dropout_p=1.0)),
    ("mask .*float32", lambda x: attention(x, x, x, mask=torch.ones(3, 3))),
    (r"bias .*\(3, 2\)", lambda x: attention(x, x, x, bias=torch.ones(3, 2))),
    ("n_kv_heads=3", lambda x: MultiHeadAttention(8, 4, n_kv_heads=3)),
    ("rope", lambda x: MultiHeadAttention(8, 4)(x[0], x[1], rope=(x, x))),
    (r"head_gate .*\(3,\)", lambda x: MultiHeadAttention(8, 4)(x[0], head_gate=torch.ones(3))),
]


@pytest.mark.parametrize(("named", "call"), WRONG, ids=[named for named, _ in WRONG])
def test_a_wrong_argument_is_refused_by_its_name(named, call):
    with pytest.raises(ValueError, match=named):
        call(torch.randn(2, 4, 3, 8))


@pytest.mark.parametrize(("name", "seed", "call", "printed"), PRINTED, ids=[row[0] for row in PRINTED])
def test_the_numbers_that_a_text_prints_are_computed(name, seed, call, printed):
    torch.manual_seed(seed)
    assert_close(torch.as_tensor(call()), torch.tensor(printed), rtol=0, atol=0.51e-4, check_dtype=False)
