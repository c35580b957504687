"""The certificate of losses and batches: on the corpus, on losses of known probabilities, and on known shifts."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tril.model.causality import corpus, target_checks
from tril.model.causality.loss_checks import certify_loss

V, B, T = 11, 4, 16
PIPELINES = {entry.name: entry for entry in corpus.entries() if entry.interface == "pipeline"}
TEXTS = {entry.name: entry for entry in corpus.entries() if entry.interface == "data"}


def certificate_of(entry, steps=200):
    built = entry.build()
    if entry.interface == "data":
        return certify_loss(train=built[0], validation=built[1])
    return certify_loss(built.losses, built.batches, model=built.model, vocab_size=entry.vocab_size, steps=steps)


def failed(certificate):
    return {result.check for result in certificate.results if not result.passed}


def first_failure(certificate):
    return next(result for result in certificate.results if not result.passed)


def batch(seed=0):
    rows = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return rows[:, :-1], rows[:, 1:]


def uniform(inputs, targets):
    return torch.full(targets.shape, math.log(V)) * (targets >= 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_every_pipeline_of_the_corpus_gets_its_verdict(name):
    assert certificate_of(PIPELINES[name]).passed is not PIPELINES[name].leaks


@pytest.mark.parametrize("name", TEXTS)
def test_every_pair_of_texts_of_the_corpus_gets_its_verdict(name):
    assert failed(certificate_of(TEXTS[name])) == ({"overlap"} if TEXTS[name].leaks else set())


@pytest.mark.parametrize(
    ("name", "check", "words"),
    [
        ("documents_split_by_the_targets", "targets", "when other targets are replaced"),
        ("noise_scaled_by_the_own_target", "targets", "add up to 1.3"),
        ("targets_fed_as_inputs_in_training", "targets", "when other targets are replaced"),
        ("validation_without_the_mask", "no future", "when the inputs from position"),
        ("labels_shifted_to_the_past", "shift", "target at position 1 of row 0 of batch 0 is the input at position 0,"),
        ("packing_without_the_shift", "shift", "target at position 0 of row 0 of batch 1 is the input at position 0,"),
        ("answers_inside_of_the_inputs", "shift", "position 16 of row 0 of batch 0 is the input at position 0"),
    ],
)
def test_a_leak_is_named(name, check, words):
    result = first_failure(certificate_of(PIPELINES[name], steps=1))
    assert result.check == check and words in result.where


@pytest.mark.parametrize("name", ["packed_documents", "dropout_in_the_pipeline", "padded_documents"])
def test_correct_pipelines_pass(name):
    assert certificate_of(PIPELINES[name], steps=30).passed


def test_a_target_two_tokens_ahead_passes_with_a_note():
    certificate = certificate_of(PIPELINES["two_tokens_ahead"], steps=1)
    assert certificate.passed and any(
        "most targets are 2 tokens from their input" in note for note in certificate.notes
    )


def test_only_the_canary_sees_targets_that_reach_the_loss_by_another_way():
    pipeline, last = PIPELINES["shifted_by_one"].build(), {}

    def batches(tokens, generator):
        for inputs, targets in pipeline.batches(tokens, generator):
            last["targets"] = targets
            yield inputs, targets

    def losses(inputs, targets):
        hint = 5.0 * F.one_hot(last["targets"], 61)[: len(targets)]  # of the batch that was drawn last
        return F.cross_entropy((pipeline.model(inputs) + hint).mT, targets, reduction="none")

    certificate = certify_loss(losses, batches, model=pipeline.model, vocab_size=61, steps=10)
    assert failed(certificate) == {"pipeline canary"}
    assert (
        "nats on random tokens of 4 kinds, but without a leak it is at least 1.3863" in first_failure(certificate).where
    )


@pytest.mark.parametrize("max_summed", [512, 1], ids=["summed", "sampled"])
@pytest.mark.parametrize(("total", "passes"), [(1.0, True), (0.5, True), (2.0, False)])
def test_the_probabilities_of_all_targets_add_up_to_a_known_sum(total, passes, max_summed, monkeypatch):
    monkeypatch.setattr(target_checks, "MAX_SUMMED", max_summed)
    certificate = certify_loss(lambda x, y: uniform(x, y) - math.log(total), [batch()], vocab_size=V)
    figures = [result.worst for result in certificate.results if result.check == "targets"]
    assert figures[0] == 0 and figures[1] == pytest.approx(total - 1, abs=1e-6)
    assert certificate.passed is passes and failed(certificate) == (set() if passes else {"targets"})


@pytest.mark.parametrize("max_summed", [512, 1], ids=["summed", "sampled"])
def test_one_token_may_be_ignored_and_two_may_not(max_summed, monkeypatch):
    monkeypatch.setattr(target_checks, "MAX_SUMMED", max_summed)
    assert certify_loss(lambda x, y: uniform(x, y) * (y != 5), [batch()], vocab_size=V).passed
    two = certify_loss(lambda x, y: uniform(x, y) * (y != 5) * (y != 6), [batch()], vocab_size=V)
    assert failed(two) == {"targets"}


def test_a_loss_of_a_later_input_names_both_positions():
    def losses(inputs, targets):  # position 9 sees position 12
        return uniform(inputs, targets) + 0.01 * inputs[:, 12:13] * (torch.arange(T) == 9)

    certificate = certify_loss(losses, [batch()], vocab_size=V)
    assert failed(certificate) == {"no future"}
    result = first_failure(certificate)
    assert result.query == 9 and result.key is not None and 9 < result.key <= 12


def test_a_loss_that_does_not_repeat_is_no_bound_for_others():
    calls = []

    def losses(inputs, targets):
        calls.append(inputs)
        return uniform(inputs, targets) + 0.01 * len(calls)

    certificate = certify_loss(losses, [batch()], vocab_size=V)
    assert failed(certificate) == {"repeatable"} and "differ by 0.01 nats" in first_failure(certificate).where


def test_a_nan_fails():
    assert not certify_loss(lambda x, y: uniform(x, y) * math.nan, [batch()], vocab_size=V).passed


@pytest.mark.parametrize(
    ("make", "leaks"),
    [
        (lambda rows: (rows[:, :-1], rows[:, 1:]), False),
        (lambda rows: (rows[:, :-1], rows[:, :-1]), True),
        (lambda rows: (rows[:, 1:], rows[:, :-1]), True),
        (lambda rows: (rows[:, :-1] * 0, rows[:, 1:] * 0), False),  # one token only
        (lambda rows: (rows[:, :-1], torch.cat([rows[:1, :-1], rows[1:, 1:]])), True),  # one row is not shifted
    ],
    ids=["shifted", "not shifted", "to the past", "constant", "one row"],
)
def test_given_batches_are_compared_by_rows(make, leaks):
    rows = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(3))
    assert failed(certify_loss(uniform, [make(rows)], vocab_size=V)) == ({"shift"} if leaks else set())


def test_a_pipeline_that_looks_tokens_up_is_compared_by_rows():
    table = torch.arange(V)

    def batches(tokens, generator):
        rows = table[tokens[:340]].view(-1, 17)
        yield rows[:, :-1], rows[:, :-1]

    certificate = certify_loss(uniform, batches, vocab_size=V)
    assert failed(certificate) == {"shift"} and "batches(distinct ids) raised IndexError" in certificate.notes[0]


def test_a_text_of_the_user_is_what_the_batches_are_made_of():
    seen = []

    def batches(tokens, generator):
        seen.append(tokens)
        yield tokens[:-1].view(1, -1), tokens[1:].view(1, -1)

    text = torch.randint(V, (20,))
    assert certify_loss(uniform, batches, tokens=text, vocab_size=V).passed and any(tokens is text for tokens in seen)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(V, 8), nn.BatchNorm1d(8), nn.Linear(8, V)
        self.register_buffer("expanded", torch.zeros(1).expand(3))

    def forward(self, ids):
        random.random(), np.random.rand(), torch.rand(1)
        x = self.embed(ids)
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))


@pytest.mark.parametrize("fails", [False, True], ids=["finished", "interrupted"])
def test_the_model_and_all_random_states_are_unchanged(fails):
    model, n_calls = Model(), 0
    model.norm.eval()
    model.head.weight.grad = gradient = torch.ones(V, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def losses(inputs, targets):
        nonlocal n_calls
        n_calls += 1
        if fails and n_calls > 200:  # while it has random weights, in training mode
            raise KeyboardInterrupt
        return F.cross_entropy(model(inputs).mT, targets, reduction="none")

    if fails:
        with pytest.raises(KeyboardInterrupt):
            certify_loss(losses, [batch()], model=model)
    else:
        certify_loss(losses, [batch()], model=model, steps=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training and model.head.training and not model.norm.training
    assert model.head.weight.grad is gradient and (gradient == 1).all() and model.embed.weight.grad is None
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_losses_without_gradient_have_no_canary_and_say_so():
    certificate = certify_loss(uniform, [batch()], model=nn.Linear(1, 1), vocab_size=V)
    assert certificate.passed and "no pipeline canary" in certificate.notes[0]
    assert {result.check for result in certificate.results} == {"repeatable", "targets", "no future", "shift"}


X, Y = batch()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (lambda x, y: uniform(x, y).mean(), [(X, Y)]),
            r"returns shape \(\) but needs .* \(4, 16\); use reduction=\"none\"",
        ),
        ((lambda x, y: 1.0, [(X, Y)]), "returns float but needs one loss per target"),
        ((uniform, [X]), "batches yields Tensor, not a pair of tensors"),
        ((uniform, [(X, Y[:, :-1])]), r"int64 \(4, 16\) and int64 \(4, 15\) but needs int64 \(B, T\) twice"),
        ((uniform, [(X.float(), Y)]), "float32 .* but needs int64"),
        ((uniform, []), "batches yields nothing; give at least one pair"),
        ((uniform, lambda tokens, generator: []), "yields nothing for 2,097,152 tokens"),
        ((uniform, [(X, torch.full_like(Y, -100))]), "every target of the first batch is negative"),
        ((uniform, [(X + V, Y)]), f"vocab_size={V} must be above every token, and the batches have 2"),
        ((), "nothing to check; give losses and batches, or train and validation"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        certify_loss(*arguments, vocab_size=V)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "vocab_size is unknown"),
        ({"model": nn.Linear(1, 1)}, "vocab_size is unknown"),
        ({"vocab_size": V, "tokens": Y[0]}, "tokens is read by a function batches"),
        ({"vocab_size": V, "train": Y[0]}, "validation=NoneType must be a tensor"),
        ({"vocab_size": V, "train": Y[0], "validation": Y}, r"validation=\(4, 16\) must be a tensor of token ids"),
        ({"vocab_size": V, "train": Y[0][:0], "validation": Y[0]}, r"train=\(0,\) must be"),
    ],
)
def test_wrong_options_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        certify_loss(uniform, [(X, Y)], **options)
