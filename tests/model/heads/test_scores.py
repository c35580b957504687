"""Scores of hand-made heads as literal values, and of a model against loops over its attention maps."""

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
    uniform_weights,
)
from tril.model.masks import document_options

EOT = 30


def one_hot(keys):
    """Weights (1, 1, T, T) of a head whose query t puts everything on keys[t]."""
    return torch.eye(len(keys))[torch.tensor(keys)][None, None]


def lower(n):
    return torch.ones(n, n, dtype=torch.bool).tril()[None]


def test_entropy():
    weights = torch.tensor(
        [[[[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.5, 0.25, 0.25, 0], [0.25, 0.25, 0.25, 0.25], [0, 0, 0, 0]]]]
    )
    expected = torch.tensor([0, math.log(2), 1.5 * math.log(2), math.log(4), 0])
    torch.testing.assert_close(entropy(weights), expected[None, None])


def test_a_previous_token_head():
    weights = one_hot([0, 0, 1, 2, 3, 4])
    assert previous_token_mass(weights).tolist() == [[[0, 1, 1, 1, 1, 1]]]
    assert self_mass(weights).tolist() == [[[1, 0, 0, 0, 0, 0]]]
    assert first_token_mass(weights).tolist() == [[[1, 1, 0, 0, 0, 0]]]
    assert mean_distance(weights).tolist() == [[[0, 1, 1, 1, 1, 1]]]
    assert induction_mass(weights).tolist() == [[[0, 0, 0]]]


def test_an_induction_head():
    weights = one_hot(
        [0, 1, 2, 3, 1, 2, 3, 4]
    )  # A B C D A B C D: the second A looks at the first B ..., the second D at the second A
    assert induction_mass(weights).tolist() == [[[1, 1, 1, 1]]]
    assert mean_distance(weights).tolist() == [[[0, 0, 0, 0, 3, 3, 3, 3]]]
    assert induction_mass(one_hot([0, 1, 2, 3, 0, 1, 2, 3])).tolist() == [
        [[0, 0, 0, 0]]
    ]  # the same token itself is another head
    assert induction_mass(one_hot([0, 0, 0, 1, 1, 2, 3, 0])).tolist() == [[[1, 1, 1, 0]]]


def test_a_uniform_head():
    weights = uniform_weights(lower(4))
    third = 1 / 3
    torch.testing.assert_close(previous_token_mass(weights), torch.tensor([[[0, 0.5, third, 0.25]]]))
    torch.testing.assert_close(self_mass(weights), torch.tensor([[[1, 0.5, third, 0.25]]]))
    torch.testing.assert_close(first_token_mass(weights), torch.tensor([[[1, 0.5, third, 0.25]]]))
    torch.testing.assert_close(mean_distance(weights), torch.tensor([[[0, 0.5, 1, 1.5]]]))
    torch.testing.assert_close(entropy(weights), torch.tensor([[[1.0, 2, 3, 4]]]).log())
    torch.testing.assert_close(induction_mass(weights), torch.tensor([[[third, 0.25]]]))


def test_fewer_queries_than_keys_are_aligned_with_the_last_keys():
    weights = torch.tensor([[[[0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.1, 0.2, 0.3, 0.4]]]])
    torch.testing.assert_close(self_mass(weights), torch.tensor([[[0.4, 0.4]]]))
    torch.testing.assert_close(previous_token_mass(weights), torch.tensor([[[0.3, 0.3]]]))
    torch.testing.assert_close(mean_distance(weights), torch.tensor([[[1.0, 1.0]]]))


def test_heads_and_rows_are_not_mixed():
    weights = torch.cat([one_hot([0, 0, 1, 2]), one_hot([0, 1, 2, 3])], dim=1).repeat(3, 1, 1, 1)
    assert previous_token_mass(weights)[2].tolist() == [[0, 1, 1, 1], [0, 0, 0, 0]]
    assert first_token_mass(weights, torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 2, 3]])).tolist() == [
        [[1, 1, 1, 0], [1, 0, 0, 0]],
        [[1, 1, 0, 0], [1, 0, 0, 0]],
        [[1, 0, 0, 0], [1, 1, 1, 1]],
    ]


def loops(model, ids, document_eot, alphabet, seed):
    """Every score of every head, position by position."""
    config, scores = model.config, {}

    def visible(row, t):
        opens = max([s for s in range(t + 1) if row[s] == document_eot], default=0)
        return [s for s in range(opens, t + 1) if s > t - (config.window or 99)], opens

    maps = attention_maps(model, ids, **document_options(ids, document_eot)).double()
    for layer in range(config.n_layers):
        for head in range(config.n_heads):
            rows = []
            for b, row in enumerate(ids.tolist()):
                for t in range(len(row)):
                    keys, opens = visible(row, t)
                    if len(keys) > 1:
                        w = maps[layer, b, head, t].tolist()
                        nats = -sum(p * math.log(p) for p in w if p > 0)
                        rows.append(
                            [
                                nats,
                                nats / math.log(len(keys)),
                                w[t - 1],
                                w[opens],
                                w[t],
                                sum(p * (t - s) for s, p in enumerate(w)),
                            ]
                        )
            scores[layer, head] = torch.tensor(rows).mean(0).tolist()
    length = min(config.context_length // 2, config.window or 99, len(alphabet))
    maps = attention_maps(model, repeated_tokens(alphabet, length, seed)).double()
    for (layer, head), values in scores.items():
        values.append(
            sum(maps[layer, :, head, t, t - length + 1].mean().item() for t in range(length, 2 * length)) / length
        )
    return scores


@pytest.mark.parametrize(
    ("choices", "document_eot"),
    [
        *(({"backend": name}, None) for name in TRAINABLE),
        ({"window": 3}, None),
        ({"n_kv_heads": 2, "window": 4}, EOT),
        ({}, EOT),
    ],
    ids=str,
)
def test_the_scores_of_a_model(choices, document_eot, monkeypatch):
    monkeypatch.setattr("tril.model.heads.attention_maps.TOKENS_PER_BATCH", 24)  # several batches
    model, ids, alphabet = tiny_gpt(**choices), torch.randint(29, (5, 12)), torch.arange(30)
    ids[:, 5], ids[1, 0], ids[2, 6] = EOT, EOT, EOT
    scores = score_heads(model, TokenWindows(ids, ids, document_eot), alphabet=alphabet, seed=3)
    assert list(scores.heads) == list(scores.uniform) == list(SCORES)
    for (layer, head), expected in loops(model, ids, document_eot, alphabet, 3).items():
        assert [scores.heads[name][layer, head].item() for name in SCORES] == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        )


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
    uniform = [1 / n for n in range(7, 13)]  # causal, n visible at the second copy of six tokens
    if not choices and document_eot is None:
        assert scores.uniform["induction"] == pytest.approx(sum(uniform) / 6)
        assert scores.uniform["entropy"] == pytest.approx(math.log(math.factorial(12)) / 11)
        assert scores.uniform["distance"] == pytest.approx(sum(range(12)) / 2 / 11)
    if choices == {"window": 5}:
        assert scores.induction_length == 5 and scores.uniform["induction"] == pytest.approx(1 / 5)
        assert scores.uniform["self"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4 + 8 / 5) / 11)
    if document_eot is not None:  # documents of 5 and 7
        assert scores.uniform["first"] == pytest.approx(
            (sum(1 / n for n in range(2, 6)) + sum(1 / n for n in range(2, 8))) / 10
        )


def test_scores_are_nan_where_one_key_is_visible():
    scores = score_heads(
        tiny_gpt(window=1),
        TokenWindows(torch.randint(31, (2, 12)), torch.zeros(2, 12)),
        alphabet=torch.arange(31),
        seed=0,
    )
    assert all(values.isnan().all() and values.shape == (2, 4) for values in scores.heads.values())
    assert all(map(math.isnan, scores.uniform.values())) and scores.table()[1] == ["L0H0"] + ["nan"] * 7


def test_repeated_tokens_are_distinct_and_written_twice():
    alphabet = torch.tensor([3, 5, 8, 9, 11, 20])
    ids = repeated_tokens(alphabet, 4, seed=0)
    assert ids.shape == (N_REPEATS, 8) and torch.equal(ids[:, :4], ids[:, 4:])
    assert all(len(set(row)) == 4 and set(row) <= set(alphabet.tolist()) for row in ids.tolist())
    assert len({tuple(row) for row in ids.tolist()}) > 20 and set(ids.flatten().tolist()) == set(alphabet.tolist())
    assert torch.equal(ids, repeated_tokens(alphabet, 4, seed=0)) and not torch.equal(
        ids, repeated_tokens(alphabet, 4, seed=1)
    )


def test_the_table():
    scores = score_heads(
        tiny_gpt(n_heads=1),
        TokenWindows(torch.randint(31, (2, 12)), torch.zeros(2, 12)),
        alphabet=torch.arange(31),
        seed=0,
    )
    cells = scores.table()
    assert [line[0] for line in cells] == ["head", "L0H0", "L1H0", "uniform"] and cells[0][1:] == list(SCORES)
    assert cells[2][3] == f"{scores.heads['previous'][1, 0].item():.3f}" and cells[3][2] == "1.000"
