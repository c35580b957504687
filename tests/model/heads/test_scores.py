"""Scores of heads against loops over positions, hand-made heads, and heads with uniform weights."""

import math

import pytest
import torch

from tests.conftest import TRAINABLE, tiny_gpt
from tril.model.heads.attention_maps import TokenWindows, attention_maps
from tril.model.heads.scores import (
    N_REPEATS,
    SCORES,
    entropy,
    first_token_mass,
    induction_mass,
    mean_distance,
    previous_token_mass,
    repeated_tokens,
    score_heads,
    self_mass,
)
from tril.model.masks import document_options

EOT = 30


def one_hot(keys):
    """Weights (1, 1, T, T) of a head whose query t puts everything on keys[t]."""
    return torch.eye(len(keys))[torch.tensor(keys)][None, None]


def test_hand_made_heads():
    weights = one_hot([0, 0, 1, 2, 3, 4])
    assert previous_token_mass(weights).tolist() == [[[0, 1, 1, 1, 1, 1]]]
    assert self_mass(weights).tolist() == [[[1, 0, 0, 0, 0, 0]]]
    assert first_token_mass(weights).tolist() == [[[1, 1, 0, 0, 0, 0]]]
    assert mean_distance(weights).tolist() == [[[0, 1, 1, 1, 1, 1]]]
    assert not induction_mass(weights).any() and not entropy(weights).any()
    # A B C D A B C D: the second A looks at the first B ..., the second D at the second A
    assert induction_mass(one_hot([0, 1, 2, 3, 1, 2, 3, 4])).tolist() == [[[1, 1, 1, 1]]]
    assert not induction_mass(one_hot([0, 1, 2, 3, 0, 1, 2, 3])).any()  # the same token itself is another head
    late = torch.tensor([[[[0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.1, 0.2, 0.3, 0.4]]]])  # two queries at the last keys
    torch.testing.assert_close(self_mass(late), torch.tensor([[[0.4, 0.4]]]))
    torch.testing.assert_close(previous_token_mass(late), torch.tensor([[[0.3, 0.3]]]))
    torch.testing.assert_close(mean_distance(late), torch.tensor([[[1.0, 1.0]]]))


def loops(model, ids, document_eot, alphabet, seed):
    """Every score of every head, position by position; positions that see one key are left out."""
    config, scores = model.config, {}

    def visible(row, t):
        opens = max([s for s in range(t + 1) if row[s] == document_eot], default=0)
        return [s for s in range(opens, t + 1) if s > t - (config.window or 99)], opens

    maps = attention_maps(model, ids, **document_options(ids, document_eot)).double()
    length = min(config.context_length // 2, config.window or 99, len(alphabet))
    repeats = attention_maps(model, repeated_tokens(alphabet, length, seed)).double()
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            rows = []
            for b, row in enumerate(ids.tolist()):
                for t in range(len(row)):
                    keys, opens = visible(row, t)
                    w = maps[layer, b, head, t].tolist()
                    nats = -sum(p * math.log(p) for p in w if p > 0)
                    distance = sum(p * (t - s) for s, p in enumerate(w))
                    if len(keys) > 1:
                        rows.append([nats, nats / math.log(len(keys)), w[t - 1], w[opens], w[t], distance])
            induction = (
                sum(repeats[layer, :, head, t, t - length + 1].mean() for t in range(length, 2 * length)) / length
            )
            scores[layer, head] = [*torch.tensor(rows).mean(0).tolist(), float(induction)]
    return scores


@pytest.mark.parametrize(
    ("choices", "document_eot"),
    [*(({"backend": name}, None) for name in TRAINABLE), ({"n_kv_heads": 2, "window": 4}, EOT)],
    ids=str,
)
def test_the_scores_of_a_model(choices, document_eot, monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 24)  # several batches
    model, ids, alphabet = tiny_gpt(**choices), torch.randint(29, (5, 12)), torch.arange(30)
    ids[:, 5], ids[1, 0], ids[2, 6] = EOT, EOT, EOT
    scores = score_heads(model, TokenWindows(ids, ids, document_eot), alphabet=alphabet, seed=3)
    assert list(scores.heads) == list(scores.uniform) == list(SCORES)
    for (layer, head), expected in loops(model, ids, document_eot, alphabet, 3).items():
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
    assert scores.uniform["entropy_share"] == pytest.approx(1)
    if not choices and document_eot is None:
        assert scores.uniform["induction"] == pytest.approx(sum(1 / n for n in range(7, 13)) / 6)
        assert scores.uniform["entropy"] == pytest.approx(math.log(math.factorial(12)) / 11)
        assert scores.uniform["distance"] == pytest.approx(sum(range(12)) / 2 / 11)


def test_scores_are_nan_where_one_key_is_visible_and_a_table_has_a_row_per_head():
    text = TokenWindows(torch.randint(31, (2, 12)), torch.zeros(2, 12))
    scores = score_heads(tiny_gpt(window=1), text, alphabet=torch.arange(31), seed=0)
    assert all(values.isnan().all() and values.shape == (2, 4) for values in scores.heads.values())
    assert all(map(math.isnan, scores.uniform.values())) and scores.table()[1] == ["L0H0"] + ["nan"] * 7
    scores = score_heads(tiny_gpt(n_heads=1), text, alphabet=torch.arange(31), seed=0)
    cells = scores.table()
    assert [line[0] for line in cells] == ["head", "L0H0", "L1H0", "uniform"] and cells[0][1:] == list(SCORES)
    assert cells[2][3] == f"{scores.heads['previous'][1, 0].item():.3f}" and cells[3][2] == "1.000"


def test_repeated_tokens_are_distinct_and_written_twice():
    alphabet = torch.tensor([3, 5, 8, 9, 11, 20])
    ids = repeated_tokens(alphabet, 4, seed=0)
    assert ids.shape == (N_REPEATS, 8) and torch.equal(ids[:, :4], ids[:, 4:])
    assert all(len(set(row)) == 4 and set(row) <= set(alphabet.tolist()) for row in ids.tolist())
    assert len({tuple(row) for row in ids.tolist()}) > 20
    same, other = (repeated_tokens(alphabet, 4, seed=seed) for seed in (0, 1))
    assert torch.equal(ids, same) and not torch.equal(ids, other)
