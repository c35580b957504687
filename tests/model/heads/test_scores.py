"""Captured weights are those that the attention used; scores against loops over positions, and uniform heads."""

import math

import pytest
import torch

from tests.conftest import BACKENDS, assert_close, tiny_gpt
from tril.model.comparison import UNCLEAR, WORSE
from tril.model.heads.attention_maps import TokenWindows, attention_maps, capture_attention
from tril.model.heads.scores import N_REPEATS, SCORES, in_words, repeated_tokens, score_heads
from tril.model.masks import document_options

EOT = 30
SHAPES = [*({"backend": name} for name in BACKENDS), {"n_kv_heads": 2, "window": 5, "pos": "alibi"}, {"causal": False}]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_the_weights_give_the_outputs_and_the_logits_are_bitwise_equal(shape):
    model, ids, inner = tiny_gpt(**shape, value_embed=False), torch.randint(31, (3, 11)), []
    hooks = []
    for block in model.blocks:
        hooks += [block.attn.v_proj.register_forward_hook(lambda *call: inner.append(call[2]))]
        hooks += [block.attn.o_proj.register_forward_pre_hook(lambda *call: inner.append(*call[1]))]
    alone = model(ids)
    for hook in hooks:
        hook.remove()
    seen = []
    with capture_attention(model, lambda *call: seen.append(call)):
        logits = model(ids)
    assert torch.equal(logits, alone) and [layer for layer, _ in seen] == [0, 1]
    for (_, weights), v, out in zip(seen, inner[::2], inner[1::2], strict=True):
        v = v.unflatten(-1, (-1, 8)).transpose(1, 2).repeat_interleave(4 // model.config.kv_heads, 1)  # (B, H, T, D)
        assert weights.dtype == torch.float32
        assert_close((weights @ v).transpose(1, 2).flatten(2), out)


def test_the_weights_are_those_before_dropout_and_an_error_leaves_no_hook():
    model, ids, seen = tiny_gpt(attn_dropout=0.5).train(), torch.randint(31, (2, 8)), []
    with capture_attention(model, lambda *call: seen.append(call)):
        model(ids)
    torch.testing.assert_close(seen[0][1].sum(-1), torch.ones(2, 4, 8))
    with pytest.raises(ZeroDivisionError), capture_attention(model, lambda layer, weights: 1 / 0):
        model(ids)
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def loops(model, ids, document_eot, alphabet, seed):
    """Every score of every head, position by position; positions that see one key are left out."""
    config, scores = model.config, {}
    maps = attention_maps(model, ids, **document_options(ids, document_eot)).double()
    length = min(config.context_length // 2, config.window or 99, len(alphabet))
    sequences = repeated_tokens(alphabet, length, seed)
    repeats, predicted = attention_maps(model, sequences).double(), model(sequences).double().log_softmax(-1)
    losses = [  # of a copy, without its first token
        -sum(predicted[b, t - 1, row[t]] for b, row in enumerate(sequences) for t in range(s + 1, s + length)).item()
        / (len(sequences) * (length - 1))
        for s in (0, length)
    ]
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            rows = []
            for b, row in enumerate(ids.tolist()):
                for t in range(len(row)):
                    opens = max([s for s in range(t + 1) if row[s] == document_eot], default=0)
                    n_keys = len([s for s in range(opens, t + 1) if s > t - (config.window or 99)])
                    w = maps[layer, b, head, t].tolist()
                    nats = -sum(p * math.log(p) for p in w if p > 0)
                    distance = sum(p * (t - s) for s, p in enumerate(w))
                    if n_keys > 1:
                        rows.append([nats, nats / math.log(n_keys), w[t - 1], w[opens], w[t], distance])
            # the second copy of a token looks at the token after the first copy
            induction = [repeats[layer, :, head, t, t - length + 1].mean() for t in range(length, 2 * length)]
            scores[layer, head] = [*torch.tensor(rows).mean(0).tolist(), float(sum(induction) / length)]
    return scores, losses


@pytest.mark.parametrize(("choices", "document_eot"), [({}, None), ({"n_kv_heads": 2, "window": 4}, EOT)], ids=str)
def test_the_scores_of_a_model(choices, document_eot, monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 24)  # several batches
    model, ids, alphabet = tiny_gpt(**choices), torch.randint(29, (5, 12)), torch.arange(30)
    ids[:, 5], ids[1, 0], ids[2, 6] = EOT, EOT, EOT
    scores = score_heads(model, TokenWindows(ids, ids, document_eot), alphabet=alphabet, seed=3)
    assert list(scores.heads) == list(scores.uniform) == list(SCORES)
    expected_scores, losses = loops(model, ids, document_eot, alphabet, 3)
    assert scores.copy_losses == pytest.approx(losses, rel=1e-5)
    for (layer, head), expected in expected_scores.items():
        found = [scores.heads[name][layer, head].item() for name in SCORES]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("choices", "document_eot"), [({}, None), ({"window": 5}, None), ({}, EOT), ({"causal": False}, None)], ids=str
)
def test_heads_with_zero_queries_have_uniform_scores(choices, document_eot):
    model, ids = tiny_gpt(**choices), torch.randint(29, (4, 12))
    ids[:, 5] = EOT
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.q_proj.weight)
    scores = score_heads(model, TokenWindows(ids, ids, document_eot), alphabet=torch.arange(30), seed=0)
    for name, values in scores.heads.items():
        torch.testing.assert_close(values, torch.full_like(values, scores.uniform[name]), msg=name)
    if not choices and document_eot is None:
        assert scores.uniform["induction"] == pytest.approx(sum(1 / n for n in range(7, 13)) / 6)
        assert scores.uniform["entropy"] == pytest.approx(math.log(math.factorial(12)) / 11)
        assert scores.uniform["distance"] == pytest.approx(sum(range(12)) / 2 / 11)


def test_a_head_is_named_by_the_scores_that_are_high_and_by_its_effect_on_the_loss():
    uniform = {"previous": 0.05, "first": 0.2, "self": 0.05, "induction": math.nan}
    heads = [
        {"head": "L0H0", "change": 0.01, "verdict": UNCLEAR, "previous": 0.33, "first": 0.3, "self": 0.1},
        {"head": "L1H1", "change": 0.123, "verdict": WORSE, "previous": 0.1, "first": 0.1, "self": 0.1},
    ]
    heads = [row | {"induction": score} for row, score in zip(heads, (math.nan, 0.43), strict=True)]
    assert in_words(heads, uniform | {"induction": 0.01}) == (
        "L0H0 attends to the previous token (0.33). L1H1 continues repeated text (induction 0.43; without it +0.12 "
        "nats). The loss rises most without L1H1: by 0.12 nats per token."
    )
    assert "L0H0" not in in_words([heads[0] | {"previous": 0.2}], uniform)


def test_scores_are_nan_where_one_key_is_visible_and_repeated_tokens_are_distinct():
    text, alphabet = (
        TokenWindows(torch.randint(31, (2, 12)), torch.zeros(2, 12).long()),
        torch.tensor([3, 5, 8, 9, 11, 20]),
    )
    scores = score_heads(tiny_gpt(window=1), text, alphabet=torch.arange(31), seed=0)
    assert all(values.isnan().all() and values.shape == (2, 4) for values in scores.heads.values())
    assert all(map(math.isnan, scores.copy_losses))
    ids, same, other = (repeated_tokens(alphabet, 4, seed=seed) for seed in (0, 0, 1))
    assert ids.shape == (N_REPEATS, 8) and torch.equal(ids[:, :4], ids[:, 4:])
    assert all(len(set(row)) == 4 and set(row) <= set(alphabet.tolist()) for row in ids.tolist())
    assert torch.equal(ids, same) and not torch.equal(ids, other) and len({tuple(row) for row in ids.tolist()}) > 20
