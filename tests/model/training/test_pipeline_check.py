"""The short check of the loss and its windows: each kind of leak that passes the checks of the model is found."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.model.training.test_causality_check import EOT, TinyData, module_of
from tril.data.batches import TrainWindows, ValWindows
from tril.model.causality.subject import randomize
from tril.model.gpt import GPT
from tril.model.training.callbacks import causality_check
from tril.model.training.callbacks.causality_check import check_pipeline

HINT = 3.0  # added to a logit


def failed(module, windows=TinyData.windows_of, precision="32-true"):
    randomize(module.model, torch.Generator().manual_seed(0))
    results = list(check_pipeline(module.losses, precision, windows, TinyData.batch_size))
    return [f"{result.check} {result.case}" for result in results if not result.passed]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("choices", [{}, {"attn_dropout": 0.2, "resid_dropout": 0.1}, {"document_eot": EOT}], ids=str)
def test_correct_pipelines_pass_and_keep_the_weights(choices, precision):
    module = module_of(**choices)
    randomize(module.model, torch.Generator().manual_seed(0))  # as in `failed`
    before = {name: value.clone() for name, value in module.model.state_dict().items()}
    assert failed(module, precision=precision) == []
    assert all(torch.equal(value, before[name]) for name, value in module.model.state_dict().items())


def test_windows_of_one_position_pass():
    def windows(tokens):
        return {"train": TrainWindows(tokens.numpy(), 1, 4, seed=0), "val": ValWindows(tokens.numpy(), 1, 4)}

    assert failed(module_of(context_length=1), windows) == []


def windows_with(part, change):
    """Those of TinyData, of which one part is changed."""

    def windows(tokens):
        batches = TinyData.windows_of(tokens)
        return batches | {part: [change(*batch) for batch in batches[part]]}

    return windows


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize(
    "change",
    [lambda x, y: (x, x), lambda x, y: (y, x), lambda x, y: (torch.cat([y[:, 7:8], x[:, 1:]], dim=1), y)],
    ids=["not shifted", "to the past", "an answer at the start"],
)
def test_targets_among_the_inputs_are_found_in_each_part(part, change):
    assert failed(module_of(), windows_with(part, change))[0] == f"shift windows={part}"


def nll_with(hint):
    """A loss whose logits get a hint that depends on targets (B, T) -> (B, T, V)."""

    def nll(self, ids, targets, **kwargs):
        logits = self(ids, **{key: kwargs[key] for key in kwargs if key != "run_block"})
        logits = logits + hint(self, ids, targets.clamp(min=0))
        return F.cross_entropy(logits.mT.float(), targets, ignore_index=-100, reduction="none")

    return nll


def next_target(model, ids, targets):
    return HINT * F.one_hot(targets.roll(-1, 1), model.config.vocab_size)


def own_target(model, ids, targets):
    return HINT * F.one_hot(targets, model.config.vocab_size)


def in_mode(training, hint):
    return lambda model, *batch: hint(model, *batch) if model.training is training else 0.0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hint", [next_target, own_target])
def test_a_loss_that_knows_targets_is_found_in_the_mode_in_which_it_does(hint, training, monkeypatch):
    monkeypatch.setattr(GPT, "nll", nll_with(in_mode(training, hint)))
    assert f"targets precision=32-true of=loss training={training}" in failed(module_of())
    assert f"targets precision=32-true of=loss training={not training}" not in failed(module_of())


def test_the_canary_sees_targets_that_reach_the_loss_by_another_way(monkeypatch):
    last = {}

    def windows(tokens):
        def kept(batches):
            for inputs, targets in batches:
                last["targets"] = targets
                yield inputs, targets

        return {part: kept(batches) for part, batches in TinyData.windows_of(tokens).items()}

    def hint(model, ids, targets):
        n_rows, length = targets.shape
        return HINT * F.one_hot(last["targets"][:n_rows, :length] % model.config.vocab_size, model.config.vocab_size)

    monkeypatch.setattr(GPT, "nll", nll_with(lambda *batch: hint(*batch) if batch[0].training else 0.0))
    monkeypatch.setattr(causality_check, "check_losses", lambda *_: ())
    assert failed(module_of(), windows) == ["pipeline canary weights=trained mode=training"]


def test_a_large_model_has_no_canary(monkeypatch):
    monkeypatch.setattr(causality_check, "CANARY_BUDGET", 1e3)
    checks = {result.check for result in check_pipeline(module_of().losses, "32-true", TinyData.windows_of, 4)}
    assert checks == {"shift", "repeatable", "targets"}


def test_the_windows_of_a_long_context_are_checked_on_a_longer_text():
    def windows(tokens):
        return {"train": TrainWindows(tokens.numpy(), 70_000, 2, seed=0), "val": ValWindows(tokens.numpy(), 70_000, 2)}

    module = module_of(context_length=70_000, pos="rope", n_layers=1)
    shifts = list(itertools.islice(check_pipeline(module.losses, "32-true", windows, 1), 2))
    assert [(r.check, r.passed, r.length, r.tested > 70_000) for r in shifts] == [("shift", True, 70_000, True)] * 2
