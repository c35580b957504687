"""The certificate on the table: leaks fail, correct rows pass, and a leak is found in the submodule where it is.

python -m pytest -n0 tests/causality    # the everyday rows; with -m "slow or not slow" all
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.causality.net import V
from tests.causality.rows import each
from tril.model.causality import certify, certify_loss
from tril.model.causality.interface import as_model
from tril.model.causality.state import State, Texts

SECONDS = {True: 10.0, False: 0.1}  # for leaks, whose search ends when one is found, and for correct models


@each("logits", "cached", "pipeline", by_chance=False)
def test_leaks_fail_and_correct_rows_pass(row):
    built = row.build()
    if row.kind == "pipeline":
        certificate = certify_loss(built.losses, built.batches, model=built.model, vocab_size=V)
    else:
        sizes = {"vocab_size": V, "context_length": row.context_length if row.leaks else 24, "expected": row.expected}
        certificate = certify(built, **sizes, budget_seconds=SECONDS[row.leaks])
    assert certificate.passed is not row.leaks, certificate
    found = certificate.failures[0].place if row.kind == "logits" and row.leaks else ""
    assert not found or f"{found}.".startswith(f"{row.place}."), certificate


SIZE, T, C = 1100, 40, 8  # of a large vocabulary


class Gated(nn.Module):
    """One token of the vocabulary sees the next position, or is seen from there."""

    def __init__(self, gate):
        super().__init__()
        self.embed, self.head, self.gate = nn.Embedding(SIZE, C), nn.Linear(C, SIZE), gate

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x.cumsum(1) + self.gate(ids)[..., None] * x.roll(-1, 1))


def test_an_id_that_opens_a_leak_is_found_in_a_large_vocabulary():
    sizes = {"vocab_size": SIZE, "context_length": T, "budget_seconds": 20.0}
    assert not certify(Gated(lambda ids: ids == 1045), **sizes).passed
    assert not certify(Gated(lambda ids: ids.roll(-1, 1) == 934), **sizes).passed
    correct = certify(Gated(lambda ids: 0 * ids), **sizes)
    assert correct.passed and not any("every id" in note for note in correct.notes)
    hurried = certify(Gated(lambda ids: 0 * ids), **sizes | {"budget_seconds": 0.0})
    assert hurried.passed and any("not every id was tested" in note for note in hurried.notes)


def test_a_row_that_depends_on_the_first_token_of_another_is_found():
    """Which no output may not see within its own row."""
    model = Gated(lambda ids: 0 * ids)
    model.head.register_forward_pre_hook(lambda _, inputs: inputs[0] + inputs[0][:1, :1])
    subject, texts = as_model(model, vocab_size=SIZE, context_length=T), Texts(SIZE)
    state = State("weights=own", subject, texts, exact=True)
    result = state.judge(state.future(T, 4))
    assert result is not None and "depends on the other rows of its batch" in result.where


@pytest.mark.parametrize("exact", [False, True])
def test_a_unit_in_the_last_place_is_a_leak_only_of_a_model_known_to_be_exact(exact):
    """Where float64 does not decide."""
    model = Gated(lambda ids: 0 * ids)
    model.head.register_forward_pre_hook(lambda _, inputs: inputs[0] * (1 + 1.2e-7 * (100 * inputs[0].sum() % 1 > 0.5)))
    subject = replace(as_model(model, vocab_size=SIZE, context_length=T), exact=exact, tolerance=1.0)
    state = State("weights=own", subject, Texts(SIZE), exact=True)
    result = state.judge(state.future(T, 16))
    assert result is not None and result.worst > 0 and result.passed is not exact


def test_a_gradient_shows_what_a_loss_takes_from_a_later_input():
    model = Gated(lambda ids: 0 * ids)

    def losses(inputs, targets, share):
        later = model.embed(inputs).roll(-1, 1).sum(-1)
        return nn.functional.cross_entropy(model(inputs).mT, targets, reduction="none") + share * later

    pairs = [tuple(torch.randint(SIZE, (2, 4, T), generator=torch.Generator().manual_seed(0)))]
    for share, checks in ((0.0, []), (1e-8, ["gradient"])):
        report = certify_loss(lambda x, y, share=share: losses(x, y, share), pairs, model=model, vocab_size=SIZE)
        assert [result.check for result in report.failures] == checks


@pytest.mark.parametrize(("distance", "checks"), [(-1, []), (0, ["shift"]), (3, ["shift"])])
def test_targets_among_the_inputs_of_given_batches_are_found(distance, checks):
    model, x = Gated(lambda ids: 0 * ids), torch.randint(SIZE, (2, T), generator=torch.Generator().manual_seed(0))
    losses = lambda x, y: nn.functional.cross_entropy(model(x).mT, y, reduction="none")  # noqa: E731
    report = certify_loss(losses, [(x, x.roll(distance, 1))], model=model, vocab_size=SIZE)
    assert [result.check for result in report.failures] == checks


def test_a_leak_is_found_where_few_of_many_logits_are_computed():
    """Which is everywhere but in the model's own weights, of which zeros hide it."""
    for n, leaks in ((0.0, False), (1.0, True)):
        model = Gated(lambda ids, n=n: n * (ids.cumsum(1) % 3 == 0))
        nn.init.zeros_(model.embed.weight)
        report = certify(model, vocab_size=SIZE, context_length=T, budget_seconds=0.0)
        assert report.passed is not leaks and any("logits were tested" in note for note in report.notes)
