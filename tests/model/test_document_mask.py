"""PreparedText documents: with the document mask each is what it would be alone.

B batch, T queries, V vocabulary.
"""

import pytest
import torch

from tests.conftest import BACKENDS, TRAINABLE, assert_close, tiny_gpt
from tril.model.masks import document_mask, split_documents

V, EOT = 31, 0
# Where documents begin in two windows of 12 tokens: with the rest of one, with a new one; an empty one at 5, one that is cut at 11.
STARTS = [[0, 3, 5, 6, 11], [0, 7]]
OPENED = [[3, 5, 6, 11], [0, 7]]  # by an end-of-text token
CONFIGS = [{"pos": "rope"}, {"pos": "learned", "norm": "layernorm", "bias": True}, {"window": 3, "n_kv_heads": 2}]
DROPOUT = {"embd_dropout": 0.1, "attn_dropout": 0.2, "resid_dropout": 0.1}


@pytest.fixture
def ids():
    ids = torch.randint(1, V, (2, 12))
    for row, places in zip(ids, OPENED):
        row[places] = EOT
    return ids


def spans():
    """(row, first, end) of every document."""
    return [(row, first, end) for row, starts in enumerate(STARTS) for first, end in zip(starts, [*starts[1:], 12])]


def packed(ids):
    documents, positions = split_documents(ids, EOT)
    return {"mask": document_mask(documents), "positions": positions}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("choices", CONFIGS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_packed_document_is_the_document_alone(ids, backend, choices, causal):
    choices = choices if causal else {key: value for key, value in choices.items() if key != "window"}
    model = tiny_gpt(**choices, causal=causal, backend=backend)
    logits, joined = model(ids, **packed(ids)), model(ids)
    for row, first, end in spans():
        assert_close(logits[row, first:end], model(ids[row : row + 1, first:end])[0])
        if first:
            assert (joined[row, first:end] - logits[row, first:end]).abs().max() > 0.01


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["eval", "train"])
@pytest.mark.parametrize("choices", CONFIGS, ids=str)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_the_loss_of_a_document_teaches_nothing_to_another(ids, backend, choices, dropout):
    model = tiny_gpt(**choices, **dropout, backend=backend).train(bool(dropout))
    embeddings = []
    model.embed.register_forward_hook(
        lambda _, __, out: embeddings.append(out.detach().requires_grad_()) or embeddings[0]
    )
    loss = model.nll(ids, torch.randint(V, (2, 12)), **packed(ids))  # (B, T)
    for row, first, end in spans():
        (gradient,) = torch.autograd.grad(loss[row, first:end].sum(), embeddings, retain_graph=True)
        own = torch.zeros(2, 12, dtype=torch.bool)
        own[row, first:end] = True
        assert torch.equal((gradient != 0).any(-1), own)  # nothing outside to the bit, something everywhere inside


def test_the_whole_loss_has_the_gradients_of_the_documents_one_by_one(ids):
    model, targets = tiny_gpt(pos="learned").double(), torch.randint(V, (2, 12))
    whole = torch.autograd.grad(model.nll(ids, targets, **packed(ids)).sum(), tuple(model.parameters()))
    alone = sum(model.nll(*(x[row : row + 1, first:end] for x in (ids, targets))).sum() for row, first, end in spans())
    for got, want in zip(whole, torch.autograd.grad(alone, tuple(model.parameters()))):
        assert_close(got, want)
