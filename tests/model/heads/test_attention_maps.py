"""Captured weights are those that the attention used, and capturing leaves outputs and gradients bitwise equal."""

import pytest
import torch

from tests.conftest import TRAINABLE, assert_close, tiny_gpt
from tril.model.heads.attention_maps import TokenWindows, attention_maps, capture_attention
from tril.model.masks import document_options

EOT = 30
SHAPES = [
    *({"backend": name} for name in TRAINABLE),
    {"n_kv_heads": 2, "pos": "alibi"},
    {"n_kv_heads": 1, "window": 5, "pos": "learned"},
    {"causal": False},
]


def observe(model, run):
    """(layer, weights) in the order of the callbacks, and the result of run()."""
    seen = []
    with torch.no_grad(), capture_attention(model, lambda layer, weights: seen.append((layer, weights))):
        result = run()
    return seen, result


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_the_weights_give_the_outputs_and_the_logits_are_bitwise_equal(shape):
    model, ids, inner = tiny_gpt(**shape), torch.randint(31, (3, 11)), []
    hooks = [block.attn.v_proj.register_forward_hook(lambda *call: inner.append(call[2])) for block in model.blocks]
    hooks += [
        block.attn.o_proj.register_forward_pre_hook(lambda *call: inner.append(*call[1])) for block in model.blocks
    ]
    alone = model(ids)
    for hook in hooks:
        hook.remove()
    seen, logits = observe(model, lambda: model(ids))
    assert torch.equal(logits, alone) and [layer for layer, _ in seen] == [0, 1]
    for (_, weights), v, out in zip(seen, inner[::2], inner[1::2], strict=True):
        v = v.unflatten(-1, (-1, 8)).transpose(1, 2).repeat_interleave(4 // model.config.kv_heads, 1)  # (B, H, T, D)
        assert weights.dtype == torch.float32
        assert_close((weights @ v).transpose(1, 2).flatten(2), out)


def test_with_a_cache_each_chunk_is_seen_over_all_keys():
    model, ids = tiny_gpt(window=4), torch.randint(31, (2, 10))
    whole, expected = observe(model, lambda: model(ids))
    cache = model.new_cache(2)
    chunks, logits = observe(
        model, lambda: torch.cat([model(part, cache=cache) for part in ids.split([6, 1, 3], 1)], 1)
    )
    assert_close(logits, expected)
    spans = [span for span in ((0, 6), (6, 7), (7, 10)) for _ in range(2)]
    for (layer, weights), (start, end) in zip(chunks, spans, strict=True):
        assert_close(weights, whole[layer][1][:, :, start:end, :end])


def test_gradients_are_bitwise_equal_and_nested_contexts_see_the_same():
    model, ids, seen = tiny_gpt(attn_dropout=0.5).train(), torch.randint(31, (2, 8)), []

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        model.nll(ids, ids).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = gradients()
    with (
        capture_attention(model, lambda *call: seen.append(call)),
        capture_attention(model, lambda *call: seen.append(call)),
    ):
        observed = gradients()
    assert all(map(torch.equal, alone, observed)) and all(module.training for module in model.modules())
    torch.testing.assert_close(seen[0][1].sum(-1), torch.ones(2, 4, 8))  # the weights before dropout
    assert [layer for layer, _ in seen] == [0, 0, 1, 1] and torch.equal(seen[0][1], seen[1][1])


def test_hooks_are_removed_also_after_an_error():
    model, ids = tiny_gpt(), torch.randint(31, (1, 5))
    with pytest.raises(ZeroDivisionError), capture_attention(model, lambda layer, weights: 1 / 0):
        model(ids)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.is_tensor(model(ids))


def test_maps_are_all_layers_in_evaluation_mode():
    model, ids = tiny_gpt(n_layers=3, embd_dropout=0.5), torch.randint(31, (2, 7))
    seen, _ = observe(model, lambda: model(ids))
    maps = attention_maps(model.train(), ids)
    assert maps.shape == (3, 2, 4, 7, 7) and torch.equal(maps, torch.stack([weights for _, weights in seen]))
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="model.n_heads=0"):
        attention_maps(tiny_gpt(n_heads=0), ids)


def test_documents_are_separate_in_maps_and_batches(monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 19)
    model, ids = tiny_gpt(), torch.tensor([[7, 3, EOT, 5, 6, 3, EOT, EOT, 9], [EOT, 1, 2, 3, 4, 5, 6, 7, 8], [1] * 9])
    maps = attention_maps(model, ids, **document_options(ids, EOT))
    for part in (slice(0, 2), slice(2, 6), slice(6, 7), slice(7, 9)):
        assert (maps[:, 0, :, part, : part.start] == 0).all()
        assert_close(maps[:, 0, :, part, part], attention_maps(model, ids[:1, part])[:, 0])
    batches = list(TokenWindows(ids, ids + 1, document_eot=EOT).batches(torch.device("cpu")))
    assert [len(part) for part, *_ in batches] == [2, 1]
    assert torch.equal(torch.cat([targets for _, targets, _ in batches]), ids + 1)
    assert batches[0][2]["positions"].tolist()[0] == [0, 1, 0, 1, 2, 3, 0, 0, 1]
