"""What the certificate measures with: on functions whose reach is known by construction.

B batch, T positions, V vocabulary, C width.
"""

import pytest
import torch
from torch import nn

from tests.conftest import BACKENDS, assert_close, tiny_gpt
from tril.model.causality.attention_probe import formula, used_weights
from tril.model.causality.checks import first_pair
from tril.model.causality.receptive_field import (
    by_gradient,
    by_perturbation,
    expected,
    first_leaking_block,
    positions_to_test,
)

V, T = 31, 12


class Mixer(nn.Module):
    """Logits at i are a sum of projected embeddings, weighed by row i of a given (T, T) matrix: its reach is that matrix."""

    def __init__(self, matrix):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.register_buffer("matrix", matrix)

    def forward(self, ids):
        return self.head(self.matrix @ self.embed(ids))  # (T, T) @ (B, T, C)


def test_expected_is_the_triangle_or_the_band():
    assert expected(3, [None, None]).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert expected(4, [2]).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert expected(4, [2, 2]).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 1],
    ]  # two layers reach twice as far
    assert expected(3, [1, 1]).int().tolist() == torch.eye(3).int().tolist()
    assert expected(4, [2, None]).equal(expected(4, [None]))  # one layer without a window sees everything


def test_both_ways_of_measuring_find_the_reach_of_a_known_function():
    matrix = torch.rand(T, T) * (torch.rand(T, T) < 0.4)
    model, generator = Mixer(matrix), torch.Generator().manual_seed(0)
    ids = torch.randint(V, (T,))
    every = torch.arange(T)
    gradient = by_gradient(model, model, ids, every, 5, generator)
    effect, noise = by_perturbation(model, ids, every, (ids + 1) % V, 5)
    assert torch.equal(gradient > 0, matrix > 0)
    assert torch.equal(effect > 0, matrix > 0) and noise == 0
    some = torch.tensor([7, 2])
    assert torch.equal(by_gradient(model, model, ids, some, 5, generator) > 0, matrix[some] > 0)
    assert torch.equal(by_perturbation(model, ids, some, (ids + 1) % V, 1)[0], effect[:, some])
    dropped = nn.Dropout(0.5)
    assert by_perturbation(lambda ids: dropped(model(ids)), ids, some, ids, 1)[1] > 0  # two runs that differ are noisy


def test_gradients_are_by_the_embedding_that_looks_up_the_ids():
    model = tiny_gpt(pos="learned")  # whose position table is an embedding too
    generator = torch.Generator().manual_seed(0)
    gradient = by_gradient(model, model, torch.randint(V, (T,)), torch.arange(T), 4, generator)
    assert torch.equal(gradient > 0, torch.ones(T, T).tril().bool())
    assert (
        by_gradient(
            lambda ids: torch.rand(*ids.shape, V), nn.Linear(2, 2), torch.arange(3), torch.arange(3), 4, generator
        )
        is None
    )


def test_long_inputs_are_tested_at_their_ends_at_the_edges_of_blocks_and_at_random():
    generator = torch.Generator().manual_seed(0)
    assert positions_to_test(20, 20, generator).tolist() == list(range(20))
    for most in (8, 24, 100):
        chosen = positions_to_test(1024, most, generator).tolist()
        assert len(chosen) == len(set(chosen)) == most and chosen == sorted(chosen)
        assert {0, 1, 1022, 1023} <= set(chosen)
    assert {127, 128, 255, 256, 63, 64, 15, 16} <= set(positions_to_test(300, 100, generator).tolist())
    assert set(positions_to_test(1024, 24, generator).tolist()) != set(positions_to_test(1024, 24, generator).tolist())


def test_first_pair_is_in_the_numbers_of_the_tested_positions():
    wrong = torch.tensor([[False, False], [False, True]])
    assert first_pair(wrong, [3, 5], [0, 9]) == (5, 9)


def test_first_leaking_block_is_the_layer_that_mixes():
    model = tiny_gpt(n_layers=3)
    ids, changed = torch.randint(V, (2, T))
    changed = (ids + 1) % V
    assert first_leaking_block(model, model.blocks, ids, changed, key=5, query=2) is None
    model.blocks[1].attn.causal = False
    assert first_leaking_block(model, model.blocks, ids, changed, key=5, query=2) == 1


@pytest.mark.parametrize(
    "choices",
    [{}, {"window": 3, "n_kv_heads": 2}, {"pos": "learned", "qk_norm": False}, {"head_dim": 6, "n_kv_heads": 1}],
    ids=str,
)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_the_probe_reads_the_weights_of_any_backend(backend, choices):
    """The module's own report, which no backend but explicit computes this way, and the formula from scratch agree with it."""
    model = tiny_gpt(**choices, backend=backend)
    attn, ids = model.blocks[1].attn, torch.randint(V, (2, T))
    before = model(ids)
    used = used_weights(attn, lambda: model(ids), T)  # (B, H, T, S)
    seen = []
    hook = attn.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    assert torch.equal(model(ids), before)  # no hook was left behind
    hook.remove()
    _, reported = attn(*seen[0][0], **seen[0][1], need_weights=True)
    assert_close(used, reported)
    visible = expected(T, [choices.get("window")])
    right, margin = formula(attn, lambda: model(ids), visible, rope=model.config.pos == "rope")
    assert ((used - right).abs() <= margin).all() and margin.max() < 1e-4


@torch.no_grad()
def test_the_probe_follows_a_decoding_in_chunks():
    model = tiny_gpt()
    ids = torch.randint(V, (1, T))

    def decode():
        cache = model.new_cache(1)
        for part in ids.split([5, 1, 4, 2], dim=1):
            model(part, cache=cache)

    attn = model.blocks[1].attn
    assert_close(used_weights(attn, decode, T), used_weights(attn, lambda: model(ids), T))
