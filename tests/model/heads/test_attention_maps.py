"""Captured weights are those that the attention used, and capturing leaves the outputs bitwise equal."""

import itertools

import pytest
import torch

from tests.conftest import TRAINABLE, assert_close, tiny_gpt
from tests.model.heads.used_weights import used_weights
from tril.model.heads.attention_maps import TokenWindows, attention_maps, capture_attention
from tril.model.masks import document_options

SHAPES = [
    {},
    {"n_kv_heads": 2},
    {"window": 3},
    {"n_kv_heads": 1, "window": 5, "pos": "learned"},
    {"causal": False},
    {"pos": "alibi", "n_kv_heads": 2},
]


def observe(model, run):
    """(layer, weights) in the order of the callbacks, and the result of run()."""
    seen = []
    with torch.no_grad(), capture_attention(model, lambda layer, weights: seen.append((layer, weights))):
        result = run()
    return seen, result


@pytest.mark.parametrize(
    ("backend", "shape"),
    [*itertools.product(TRAINABLE, SHAPES), pytest.param("flex", SHAPES[3], marks=pytest.mark.slow)],
    ids=str,
)
def test_the_weights_are_those_that_were_used_and_the_logits_are_bitwise_equal(backend, shape):
    model, ids = tiny_gpt(backend=backend, **shape), torch.randint(31, (3, 11))
    with torch.no_grad():
        alone = model(ids)
    seen, logits = observe(model, lambda: model(ids))
    assert torch.equal(logits, alone)
    assert [layer for layer, _ in seen] == [0, 1]
    for layer, weights in seen:
        assert weights.dtype == torch.float32
        assert_close(weights, used_weights(model.blocks[layer].attn, lambda: model(ids), 11))


@pytest.mark.parametrize("backend", TRAINABLE)
def test_the_weights_equal_those_of_need_weights(backend):
    model, ids = tiny_gpt(backend=backend, pos="none", n_kv_heads=2), torch.randint(31, (2, 9))
    seen, _ = observe(model, lambda: model(ids))
    x = model.embed(ids)
    for (_, weights), block in zip(seen, model.blocks, strict=True):
        _, expected = block.attn(block.norm1(x), need_weights=True)
        assert torch.equal(weights, expected)
        x = x + block.attn(block.norm1(x))
        x = x + block.mlp(block.norm2(x))


def test_with_a_cache_each_chunk_is_seen_over_all_keys():
    model, ids = tiny_gpt(window=4), torch.randint(31, (2, 10))
    whole, expected = observe(model, lambda: model(ids))
    cache = model.new_cache(2)
    chunks, logits = observe(
        model, lambda: torch.cat([model(part, cache=cache) for part in ids.split([6, 1, 3], dim=1)], dim=1)
    )
    assert_close(logits, expected)
    starts = [(0, 6), (6, 7), (7, 10)]
    assert [(layer, *weights.shape[2:]) for layer, weights in chunks] == [
        (i, end - start, end) for start, end in starts for i in (0, 1)
    ]
    for (layer, weights), (start, end) in zip(chunks, [span for span in starts for _ in (0, 1)], strict=True):
        assert_close(weights, whole[layer][1][:, :, start:end, :end])


def test_gradients_are_bitwise_equal():
    model, ids = tiny_gpt(attn_dropout=0.5).train(), torch.randint(31, (2, 8))

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model.nll(ids, ids).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = gradients()
    with capture_attention(model, lambda layer, weights: seen.append(weights)):
        seen = []
        observed = gradients()
    assert all(map(torch.equal, alone, observed))
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, 4, 8))  # the weights before dropout
    assert all(module.training for module in model.modules())


def test_hooks_are_removed_also_after_an_error():
    model, ids = tiny_gpt(), torch.randint(31, (1, 5))
    with pytest.raises(ZeroDivisionError), capture_attention(model, lambda layer, weights: 1 / 0):
        model(ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_tensor(model(ids))


def test_nested_contexts_see_the_same_weights():
    model, ids = tiny_gpt(), torch.randint(31, (2, 5))
    outer, (inner, _) = observe(model, lambda: observe(model, lambda: model(ids)))
    assert [layer for layer, _ in outer] == [layer for layer, _ in inner] == [0, 1]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(outer, inner, strict=True))


def test_a_model_without_attention_has_no_weights():
    model, ids = tiny_gpt(n_heads=0), torch.randint(31, (2, 5))
    assert observe(model, lambda: model(ids))[0] == []
    with pytest.raises(ValueError, match="model.n_heads=0"):
        attention_maps(model, ids)


def test_maps_are_all_layers_in_evaluation_mode():
    model, ids = tiny_gpt(n_layers=3, embd_dropout=0.5), torch.randint(31, (2, 7))
    seen, _ = observe(model, lambda: model(ids))
    model.train()
    maps = attention_maps(model, ids)
    assert maps.shape == (3, 2, 4, 7, 7) and torch.equal(maps, torch.stack([weights for _, weights in seen]))
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="context_length=12"):
        attention_maps(model, torch.zeros(1, 13, dtype=int))


@pytest.mark.parametrize("pos", ["rope", "learned", "alibi"])
def test_documents_are_separate(pos):
    model, eot = tiny_gpt(pos=pos), 30
    ids = torch.tensor([[7, 3, eot, 5, 6, 3, eot, eot, 9], [eot, 1, 2, 3, 4, 5, 6, 7, 8]])
    documents = [[slice(0, 2), slice(2, 6), slice(6, 7), slice(7, 9)], [slice(0, 9)]]
    with torch.no_grad():
        together = model(ids, **document_options(ids, eot))
        for row, (tokens, parts) in enumerate(zip(ids, documents, strict=True)):
            assert_close(together[row], torch.cat([model(tokens[None, part])[0] for part in parts]))
    maps = attention_maps(model, ids, **document_options(ids, eot))
    for part in documents[0]:
        assert (maps[:, 0, :, part, : part.start] == 0).all()
    assert document_options(ids, None) == {}


def test_windows_are_split_into_batches(monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 9)
    ids = torch.arange(20).view(5, 4)
    batches = list(TokenWindows(ids, ids + 1, document_eot=8).batches(torch.device("cpu")))
    assert [len(part) for part, *_ in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([part for part, *_ in batches]), ids) and torch.equal(
        torch.cat([part for _, part, _ in batches]), ids + 1
    )
    assert batches[1][2]["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]] and batches[1][2]["mask"].shape == (
        2,
        1,
        4,
        4,
    )
    long = torch.zeros(2, 10, dtype=int)
    assert [len(part) for part, *_ in TokenWindows(long, long).batches(torch.device("cpu"))] == [1, 1]
