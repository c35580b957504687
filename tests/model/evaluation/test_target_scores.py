"""The scores of targets: against a loop over prefixes, one forward pass each, and closed forms."""

import math

import numpy as np
import pytest
import torch

from tests.conftest import tiny_gpt
from tril.data.batches import gather
from tril.model.evaluation.target_scores import score_targets, window_starts
from tril.model.masks import document_mask, split_documents

T, V = 12, 5  # few ids, so that some guesses are right
TOKENS = np.random.default_rng(0).integers(0, V, 53).astype(np.uint16)
N_TARGETS = len(TOKENS) - 1


def first_input(target: int, stride: int) -> int:
    """Where the window of a target begins, by trying all windows from the first."""
    start = 0
    while target > start + T:  # the window's last target is tokens[start + T]
        start += stride
    return start


@pytest.mark.parametrize("stride", [1, 5, 11, 12])
def test_every_target_is_scored_once_with_its_context(stride):
    model = tiny_gpt(vocab_size=V)
    starts = window_starts(N_TARGETS, T, stride)
    scores = score_targets(model, TOKENS, starts, stride)
    assert scores.inputs.tolist() == list(range(N_TARGETS))
    for target in range(1, len(TOKENS)):
        start = first_input(target, stride)
        prefix = torch.from_numpy(TOKENS[start:target].astype(np.int64))
        with torch.no_grad():
            log_p = model(prefix[None])[0, -1].double().log_softmax(-1)
        i = target - 1
        assert scores.columns[i] == len(prefix) - 1
        assert scores.nll[i] == pytest.approx(-log_p[TOKENS[target]].item(), abs=2e-5)
        assert scores.confidence[i] == pytest.approx(log_p.max().exp().item(), abs=1e-5)
        assert scores.correct[i] == (log_p.argmax() == TOKENS[target])
    assert scores.correct.any() and not scores.correct.all()


def test_windows_that_do_not_overlap_are_those_of_validation():
    model = tiny_gpt(vocab_size=V)
    inputs, targets = gather(TOKENS, np.arange(5), T)  # as ValWindows
    with torch.no_grad():
        nll = model.nll(inputs, targets)
    scores = score_targets(model, TOKENS, window_starts(N_TARGETS, T, T), T)
    assert scores.nll == pytest.approx(nll.flatten()[:N_TARGETS].numpy(), abs=1e-5)
    assert (nll.flatten()[N_TARGETS:] == 0).all() and len(nll.flatten()) > N_TARGETS


def test_documents_are_separate_as_in_training():
    model, eot = tiny_gpt(vocab_size=V), 3
    scores = score_targets(model, TOKENS, window_starts(N_TARGETS, T, T), T, document_eot=eot)
    inputs, targets = gather(TOKENS, np.arange(5), T)
    documents, positions = split_documents(inputs, eot)
    with torch.no_grad():
        expected = model.nll(inputs, targets, mask=document_mask(documents), positions=positions)
        joined = model.nll(inputs, targets)
    assert scores.nll == pytest.approx(expected.flatten()[:N_TARGETS].numpy(), abs=1e-5)
    assert not torch.allclose(expected, joined, atol=1e-2)


@pytest.mark.parametrize(
    ("n_targets", "stride", "limit", "starts"),
    [
        (1, 12, None, [0]),
        (12, 12, None, [0]),
        (13, 12, None, [0, 12]),
        (24, 12, None, [0, 12]),
        (13, 5, None, [0, 5]),
        (17, 5, None, [0, 5]),
        (18, 5, None, [0, 5, 10]),
        (14, 1, None, [0, 1, 2]),
        (52, 12, 2, [0, 48]),
        (52, 12, 3, [0, 24, 48]),
        (52, 12, 9, [0, 12, 24, 36, 48]),
        (52, 5, 3, [0, 20, 40]),
    ],
)
def test_the_starts_of_windows(n_targets, stride, limit, starts):
    assert window_starts(n_targets, T, stride, limit).tolist() == starts


def test_a_limit_scores_whole_windows():
    model = tiny_gpt(vocab_size=V)
    scores = score_targets(model, TOKENS, window_starts(N_TARGETS, T, T, 3), T)
    whole = score_targets(model, TOKENS, window_starts(N_TARGETS, T, T), T)
    expected = [*range(12), *range(24, 36), *range(48, 52)]
    assert scores.inputs.tolist() == expected
    assert scores.nll == pytest.approx(whole.nll[expected], abs=1e-5)


@pytest.mark.parametrize("stride", [4, 12])
def test_a_uniform_model(stride):
    model = tiny_gpt(vocab_size=V)
    torch.nn.init.zeros_(model.head.weight)
    scores = score_targets(model, TOKENS, window_starts(N_TARGETS, T, stride), stride)
    assert scores.nll == pytest.approx(np.full(N_TARGETS, math.log(V)), abs=1e-6)
    assert scores.confidence == pytest.approx(np.full(N_TARGETS, 1 / V), abs=1e-7)
    assert scores.correct.tolist() == (TOKENS[1:] == 0).tolist() and scores.correct.any()  # argmax of equal logits


def test_the_mode_of_the_model_is_restored():
    model = tiny_gpt(vocab_size=V, embd_dropout=0.5).train()
    starts = window_starts(N_TARGETS, T, T)
    first, second = (score_targets(model, TOKENS, starts, T) for _ in range(2))
    assert model.training and (first.nll == second.nll).all()
