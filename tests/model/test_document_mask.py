"""Packed documents: with the document mask, each gives the same result as alone.

B batch, T queries, V vocabulary.
"""

from itertools import pairwise

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, TRAINABLE, assert_close, tiny_gpt
from tril.model.masks import document_mask, split_documents

V, EOT = 31, 0
# Columns where documents start, in two windows of 12 tokens. Row 0 starts with the rest of a document, row 1 with a new
# one. In row 0 the document at 5 is empty and the one at 11 is truncated.
STARTS = [[0, 3, 5, 6, 11], [0, 7]]
EOT_COLUMNS = [[3, 5, 6, 11], [0, 7]]
CONFIGS = [
    {"pos": "rope"},
    {"pos": "learned", "norm": "layernorm", "bias": True},
    {"window": 3, "n_kv_heads": 2},
    {"pos": "alibi", "n_kv_heads": 2},
]
DROPOUT = {"embd_dropout": 0.1, "attn_dropout": 0.2, "resid_dropout": 0.1}


@pytest.fixture
def ids():
    ids = torch.randint(1, V, (2, 12))
    for row, columns in zip(ids, EOT_COLUMNS, strict=True):
        row[columns] = EOT
    return ids


def spans():
    """(row, start, end) of every document."""
    return [(row, start, end) for row, starts in enumerate(STARTS) for start, end in pairwise([*starts, 12])]


def packed(ids):
    documents, positions = split_documents(ids, EOT)
    return {"mask": document_mask(documents), "positions": positions}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("choices", CONFIGS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS_SLOW_FLEX)
@torch.no_grad()
def test_a_packed_document_equals_the_document_alone(ids, backend, choices, causal):
    choices = choices if causal else {key: value for key, value in choices.items() if key != "window"}
    model = tiny_gpt(**choices, causal=causal, backend=backend)
    logits, without_mask = model(ids, **packed(ids)), model(ids)
    for row, start, end in spans():
        assert_close(logits[row, start:end], model(ids[row : row + 1, start:end])[0])
        if start:
            assert (without_mask[row, start:end] - logits[row, start:end]).abs().max() > 0.01


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["eval", "train"])
@pytest.mark.parametrize("choices", CONFIGS, ids=str)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_the_loss_of_a_document_has_no_gradient_for_other_documents(ids, backend, choices, dropout):
    model = tiny_gpt(**choices, **dropout, backend=backend).train(bool(dropout))
    embeddings = model.embed(ids).detach().requires_grad_()
    model.embed.register_forward_hook(lambda *_: embeddings)
    loss = model.nll(ids, torch.randint(V, (2, 12)), **packed(ids))  # (B, T)
    for row, start, end in spans():
        (gradient,) = torch.autograd.grad(loss[row, start:end].sum(), embeddings, retain_graph=True)
        inside = torch.zeros(2, 12, dtype=torch.bool)
        inside[row, start:end] = True
        assert torch.equal((gradient != 0).any(-1), inside)  # exactly 0 outside, nowhere 0 inside


@pytest.mark.parametrize("pos", ["learned", "alibi"])
def test_the_loss_of_packed_documents_has_the_gradients_of_the_documents_alone(ids, pos):
    model, targets = tiny_gpt(pos=pos).double(), torch.randint(V, (2, 12))
    parameters = tuple(model.parameters())
    packed_loss = model.nll(ids, targets, **packed(ids)).sum()
    separate_loss = sum(
        model.nll(ids[row : row + 1, start:end], targets[row : row + 1, start:end]).sum() for row, start, end in spans()
    )
    gradients = torch.autograd.grad(packed_loss, parameters)
    for actual, expected in zip(gradients, torch.autograd.grad(separate_loss, parameters), strict=True):
        assert_close(actual, expected)
