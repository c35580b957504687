"""Measured dependencies of functions whose dependencies are known by construction.

B batch, T positions, V vocabulary, C width.
"""

import torch
from torch import nn

from tests.conftest import tiny_gpt
from tril.model.causality.receptive_field import (
    dependencies_by_gradient,
    dependencies_by_perturbation,
    expected_dependencies,
    positions_to_test,
)

V, T = 31, 12


class Mixer(nn.Module):
    """Logits at i sum projected embeddings with the weights of row i of a (T, T) matrix: its dependencies."""

    def __init__(self, matrix):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)
        self.register_buffer("matrix", matrix)

    def forward(self, ids):
        return self.head(self.matrix @ self.embed(ids))  # (T, T) @ (B, T, C)


def test_expected_dependencies_are_the_triangle_or_the_band():
    assert expected_dependencies(3, [None, None]).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    band = expected_dependencies(4, [2])
    assert band.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    twice = expected_dependencies(4, [2, 2])  # two layers see twice as far
    assert twice.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    assert expected_dependencies(3, [1, 1]).int().tolist() == torch.eye(3).int().tolist()
    assert expected_dependencies(4, [2, None]).equal(expected_dependencies(4, [None]))  # one full layer is enough


def test_both_methods_measure_the_dependencies_of_a_known_function():
    matrix = torch.rand(T, T) * (torch.rand(T, T) < 0.4)
    model, generator = Mixer(matrix), torch.Generator().manual_seed(0)
    ids, every, some = torch.randint(V, (T,)), torch.arange(T), torch.tensor([7, 2])
    gradient = dependencies_by_gradient(model, model, ids, every, 5, generator)
    effect, noise = dependencies_by_perturbation(model, ids, every, (ids + 1) % V, 5)
    assert torch.equal(gradient > 0, matrix > 0)
    assert torch.equal(effect > 0, matrix > 0) and noise == 0
    assert torch.equal(dependencies_by_gradient(model, model, ids, some, 5, generator) > 0, matrix[some] > 0)
    assert torch.equal(dependencies_by_perturbation(model, ids, some, (ids + 1) % V, 1)[0], effect[:, some])
    dropout = nn.Dropout(0.5)
    assert dependencies_by_perturbation(lambda ids: dropout(model(ids)), ids, some, ids, 1)[1] > 0  # runs differ


def test_gradients_are_taken_at_the_embedding_that_looks_up_the_ids():
    model = tiny_gpt(pos="learned")  # its position table is an embedding too
    generator, three = torch.Generator().manual_seed(0), torch.arange(3)
    gradient = dependencies_by_gradient(model, model, torch.randint(V, (T,)), torch.arange(T), 4, generator)
    assert torch.equal(gradient > 0, torch.ones(T, T).tril().bool())
    without = nn.Linear(2, 2)
    assert dependencies_by_gradient(lambda x: torch.rand(*x.shape, V), without, three, three, 4, generator) is None


class Positions(nn.Embedding):
    """Position embeddings of ids, without batch dimension, as in BART, or of a shape, as in RoFormer."""

    def forward(self, ids):
        return super().forward(torch.arange((ids if isinstance(ids, torch.Size) else ids.shape)[1]))  # (T, C)


class WithPositions(nn.Module):
    def __init__(self, argument, in_place):
        super().__init__()
        self.embed, self.positions = nn.Embedding(V, V), Positions(T, V)
        self.argument, self.in_place = argument, in_place

    def forward(self, ids):
        x = self.embed(input=ids)
        if self.in_place:
            x *= 2
        return x.cumsum(1) * self.positions(self.argument(ids))


def test_other_embeddings_keywords_and_changes_in_place_do_not_disturb_gradients():
    for argument, in_place in ((lambda ids: ids, False), (lambda ids: ids.shape, True)):
        model = WithPositions(argument, in_place)
        ids, every = torch.randint(V, (T,)), torch.arange(T)
        gradient = dependencies_by_gradient(model, model, ids, every, 5, torch.Generator().manual_seed(0))
        assert torch.equal(gradient > 0, torch.ones(T, T).tril().bool())


def test_long_inputs_are_sampled_at_their_ends_at_block_edges_and_at_random():
    generator = torch.Generator().manual_seed(0)
    assert positions_to_test(20, 20, generator).tolist() == list(range(20))
    for limit in (8, 24, 100):
        chosen = positions_to_test(1024, limit, generator).tolist()
        assert len(chosen) == len(set(chosen)) == limit and chosen == sorted(chosen)
        assert {0, 1, 1022, 1023} <= set(chosen)
    assert {127, 128, 255, 256, 63, 64, 15, 16} <= set(positions_to_test(300, 100, generator).tolist())
    assert set(positions_to_test(1024, 24, generator).tolist()) != set(positions_to_test(1024, 24, generator).tolist())
