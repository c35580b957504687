"""The certificate of a run's loss and windows: what it covers, and that leaks in either are found."""

import pytest
import torch
import torch.nn.functional as F

from tril.data import batches
from tril.model import masks
from tril.model.causality.certificate import Certificate
from tril.model.causality.model import randomize
from tril.model.gpt import GPT, GPTConfig
from tril.scripts.cli import run_pipeline
from tril.scripts.cli.run_pipeline import certify_pipeline

EOT = 0
RUN = {"data": {"eot_id": EOT}, "settings": {"data.document_mask": False, "seed": 3}}


@pytest.fixture
def model():
    model = GPT(GPTConfig(vocab_size=31, context_length=40, n_layers=2, dim=32, n_heads=4))
    return randomize(model, torch.Generator().manual_seed(0)).eval()


def certificate_of(*arguments):
    certificate = Certificate("run")
    certificate.add(certify_pipeline(*arguments))
    return certificate


def failed(certificate):
    return {f"{result.check} {result.variant}" for result in certificate.results if not result.passed}


@pytest.mark.parametrize("separate", [False, True])
def test_a_run_passes_and_the_model_is_as_before(model, separate):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    certificate = certificate_of(model, {**RUN, "settings": {"data.document_mask": separate}})
    assert certificate.passed, certificate.failures
    assert certificate.checks() == {"future": 4, "equal": 4, "targets": 8, "shift": 3, "canary": 2}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()) and not model.training
    assert {result.length for result in certificate.results} == {40}


def test_windows_of_a_large_model_are_shorter(model, monkeypatch):
    monkeypatch.setattr(run_pipeline, "MAX_FLOPS", 1.0)
    assert {result.length for result in certificate_of(model, RUN).results} == {16}


@pytest.mark.parametrize("windows", ["TrainWindows", "ValWindows"])
def test_windows_that_are_not_shifted_fail(model, windows, monkeypatch):
    class NotShifted(getattr(batches, windows)):
        def __iter__(self):
            return ((inputs, inputs) for inputs, _ in super().__iter__())

    monkeypatch.setattr(run_pipeline, windows, NotShifted)
    found = failed(certificate_of(model, RUN))
    assert "shift distinct tokens" in found
    assert ("canary weights=trained mode=evaluation" in found) is (windows == "TrainWindows")


def test_documents_that_the_targets_separate_fail(model, monkeypatch):
    def separated(inputs, eot):  # the window is cut after the target's end-of-text token, which the input cannot know
        starts = (inputs == eot).roll(-1, 1)
        documents = starts.cumsum(1)
        return documents, torch.arange(inputs.shape[1]).expand_as(inputs)

    monkeypatch.setattr(masks, "split_documents", separated)
    found = failed(certificate_of(model, {**RUN, "settings": {"data.document_mask": True}}))
    assert any(name.startswith("future") for name in found)


def test_a_loss_that_knows_its_target_in_evaluation_mode_fails(model, monkeypatch):
    nll = GPT.nll

    def peeking(self, ids, targets, **kwargs):
        loss = nll(self, ids, targets, **kwargs)
        return loss if self.training else loss - 0.5 * F.one_hot(targets.clamp(min=0) % 2, 2)[..., 0] * (targets >= 0)

    monkeypatch.setattr(GPT, "nll", peeking)
    assert failed(certificate_of(model, RUN)) == {
        "targets weights=own mode=evaluation", "targets weights=random mode=evaluation",
        "canary weights=trained mode=evaluation",
    }  # fmt: skip
