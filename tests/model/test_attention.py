"""What the contract leaves open of attention: torch.compile, edited masks, bf16 blocks, sizes of zero, documents.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import BACKENDS, assert_close, randomize, tiny_gpt
from tril.model import backends, causal_mask, masks
from tril.model.attention import MultiHeadAttention, attention
from tril.model.causality import certify
from tril.model.causality.gpt import visible_of
from tril.model.generation.generate import decode_step
from tril.model.kv_cache import KVCache
from tril.model.masks import document_options
from tril.model.offset_keys import OffsetKeys

B, H, D, C = 2, 4, 8, 24
SIZES = [(6, 6), (3, 7), (7, 3), (1, 6)]  # (T, S)
OPTIONS = [
    lambda t, s: {},
    lambda t, s: {"causal": True, "window": 2, "mask": torch.rand(B, 1, t, s) < 0.7},
    lambda t, s: {"causal": True, "bias": torch.randn(H, t, s)},
    lambda t, s: {"mask": causal_mask(t, s), "bias": torch.randn(B, 1, 1, s), "need_weights": True},
]


def qkv(t: int, s: int, dtype=torch.float32) -> list[torch.Tensor]:
    return [torch.randn(B, *size, dtype=dtype) for size in ((H, t, D), (2, s, D), (2, s, 5))]


def fully_compiled(function):
    """torch.compile that fails at a graph break."""
    torch._dynamo.reset()
    return torch.compile(function, backend="eager", fullgraph=True, dynamic=False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_attention_equals_the_uncompiled_with_its_gradients(backend):
    run = fully_compiled(attention)
    for (t, s), make in zip(SIZES, OPTIONS, strict=True):
        options, inputs = make(t, s) | {"backend": backend}, [x.requires_grad_() for x in qkv(t, s)]
        results = []
        for function in (run, attention):
            out = function(*inputs, **options)
            out = out if isinstance(out, tuple) else (out,)
            results.append((*out, *torch.autograd.grad(out, inputs, [torch.ones_like(x) for x in out])))
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected.double())


RULES = {
    "usual": lambda query, key, window: (key <= query) & (key > query - (window or 99)),
    "every second": lambda query, key, window: (key <= query) & ((query - key) % 2 == 0),
    "not itself": lambda query, key, window: key < query,
    "the first": lambda query, key, window: key < 1,
    "the future": lambda query, key, window: key <= query + 1,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_computes_the_mask_that_is_defined(backend, rule, monkeypatch):
    monkeypatch.setattr(masks, "visible_from_positions", RULES[rule])
    for (t, s), max_weights in itertools.product((*SIZES, (300, 300)), (0, 10**9)):  # in bf16 by torch, and in blocks
        monkeypatch.setattr(backends, "MAX_WEIGHTS", max_weights)
        visible = RULES[rule](torch.arange(t)[:, None] + s - t, torch.arange(s), None)
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = qkv(t, s, dtype)
            expected = attention(q.double(), k.double(), v.double(), mask=visible, backend="explicit")
            assert_close(attention(q, k, v, causal=True, backend=backend), expected)


@pytest.mark.parametrize("rule", list(RULES)[:2])
def test_compiled_attention_computes_the_mask_that_is_defined_for_all_sizes(rule, monkeypatch):
    monkeypatch.setattr(masks, "visible_from_positions", RULES[rule])
    torch._dynamo.reset()
    run = torch.compile(attention, backend="eager", fullgraph=True)  # the second size is a symbol
    for t in (6, 5, 1):
        inputs = qkv(t, t)
        assert torch.equal(run(*inputs, causal=True), attention(*inputs, causal=True))


@torch.no_grad()
def test_decoding_and_the_certificate_follow_the_mask_that_is_defined(monkeypatch):
    monkeypatch.setattr(masks, "visible_from_positions", RULES["every second"])
    model, ids = tiny_gpt(key_offset=False, backend="fused", n_layers=1), torch.randint(31, (1, 12))
    expected, cache, steps = model(ids), model.new_cache(1), model.new_cache(1)
    assert_close(torch.cat([model(part, cache=cache) for part in ids.split([5, 1, 1, 3, 2], 1)], 1), expected)
    for position in torch.arange(12).split(1):  # with the shapes of a compiled step
        out = decode_step(model, ids[:, position], position, 12, cache=steps, cache_position=position)
        assert_close(out, expected[:, position[0]])
    assert certify(model, budget_seconds=0.1).passed
    monkeypatch.setattr(masks, "visible_from_positions", RULES["the future"])
    assert not certify(model, budget_seconds=0.1).passed


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("offset", "heads"), [(False, 4), (True, 4), (False, 0)])
def test_the_certificate_expects_the_past_that_two_layers_pass_on(rule, offset, heads, monkeypatch):
    monkeypatch.setattr(masks, "visible_from_positions", RULES[rule])
    shows = lambda i, j: heads and j < 7 and RULES[rule](i, j, None)  # noqa: E731
    layer = [[i == j or shows(i, j) or (offset and shows(i, j + 1)) for j in range(7)] for i in range(7)]
    expected = [[j <= i and any(layer[i][k] and layer[k][j] for k in range(7)) for j in range(7)] for i in range(7)]
    config = tiny_gpt(key_offset=offset, n_heads=heads).config
    assert visible_of(config, 7).tolist() == expected


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_heads_and_batch_may_be_left_out_and_sizes_may_be_zero(backend):
    q, k, v = (x[:, :1] for x in qkv(6, 6))
    whole = attention(q, k, v, causal=True, backend=backend)
    assert_close(attention(q[:, 0], k[:, 0], v[:, 0], causal=True, backend=backend), whole[:, 0])
    assert_close(attention(q[1, 0], k[1, 0], v[1, 0], causal=True, backend=backend), whole[1, 0])
    for t, s in ((0, 5), (5, 0), (0, 0)):
        out = attention(*qkv(t, s), causal=True, backend=backend)
        assert out.shape == (B, H, t, 5) and not out.any()


def test_the_largest_scores_do_not_overflow():
    q, k, v = (1e4 * x for x in qkv(5, 5))
    expected = attention(q.double(), k.double(), v.double(), causal=True, backend="explicit")
    for backend in BACKENDS:
        assert_close(attention(q, k, v, causal=True, backend=backend), expected)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=5, max_size=5), min_size=1, max_size=3))
def test_documents_begin_with_their_end_of_text_token(rows):
    options = document_options(torch.tensor(rows), 0)
    for row, mask, positions in zip(rows, options["mask"][:, 0].tolist(), options["positions"].tolist(), strict=True):
        starts = [i for i, token in enumerate(row) if token == 0]
        numbers = [sum(start <= i for start in starts) for i in range(5)]
        assert mask == [[a == b for b in numbers] for a in numbers]
        assert positions == [i - max([0, *(start for start in starts if start <= i)]) for i in range(5)]
    assert document_options(torch.tensor(rows), None) == {}


def test_half_of_a_key_is_that_of_the_position_before_where_a_query_sees_both():
    k = torch.arange(1.0, 25).view(1, 1, 3, 8)  # the pairs are (0, 4), (1, 5), (2, 6), (3, 7)
    rows = [[1, 2, 0, 0, 5, 6, 0, 0], [9, 10, 3, 4, 13, 14, 7, 8], [17, 18, 11, 12, 21, 22, 15, 16]]
    keys = OffsetKeys(8)
    assert keys.shift(k).tolist() == [[rows]]
    for mask in (None, torch.ones(1, dtype=torch.bool)):
        assert keys.separate(keys.shift(k), 3, mask=mask, bias=None).tolist() == [[rows]]
    rows[1] = [9, 10, 0, 0, 13, 14, 0, 0]
    for mask in ([[0, 1, 1]], [[1, 0, 0], [0, 1, 0], [0, 1, 1]]):  # padding on the left, and a document behind another
        separated = keys.separate(keys.shift(k), 3, mask=torch.tensor(mask).bool(), bias=None)
        assert separated.tolist() == [[rows]]
    assert torch.equal(OffsetKeys(3).shift(k[..., :3]), k[..., :3])


@torch.no_grad()
def test_a_decoding_step_is_compiled_once_and_equals_the_full_pass():
    attn = randomize(MultiHeadAttention(C, H, n_kv_heads=2, v_head_dim=5, window=4, key_offset=True))
    x = torch.randn(B, 6, C)
    bias, cache, step = torch.randn(H, 6, 8), KVCache(1, B, 2, 8, C // H, v_head_dim=5), fully_compiled(attn)
    outputs = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for t in range(6):
            options = {"bias": bias[:, t : t + 1].clone(), "cache": cache.layer(0, torch.tensor([t]))}
            outputs.append(step(x[:, t : t + 1], **options))
    assert_close(torch.cat(outputs, dim=1), attn(x, bias=bias[..., :6]))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.sampled_from([1, 3, 256]), st.booleans(), st.sampled_from([0, 10**9]), st.sampled_from(SIZES))
def test_bf16_on_a_cpu_is_close_to_float64_in_blocks_and_without(block, causal, max_weights, sizes):
    causal = causal and sizes[0] == sizes[1]
    inputs = qkv(*sizes, dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "QUERY_BLOCK", block)
        patch.setattr(backends, "MAX_WEIGHTS", max_weights)
        out = attention(*inputs, causal=causal)
    assert out.dtype == torch.bfloat16
    assert_close(out, attention(*(x.double() for x in inputs), causal=causal, backend="explicit"), roundings=4)
