"""The short certificate before the first step: what it finds, that it changes nothing, and that a leak ends the run."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning import Trainer

from tests.conftest import tiny_gpt, training_module
from tril.data.batches import TrainWindows, ValWindows
from tril.model.attention import BACKENDS, MultiHeadAttention
from tril.model.training.callbacks import causality_check
from tril.model.training.callbacks.causality_check import CausalityCheck, certify, check_weights

V, T = 31, 40
LEAK = "future loss precision=32-true"


def module_of(*, compile=False, **choices):
    return training_module(tiny_gpt(context_length=T, **choices).train(), 100, compile=compile)


def windows_of(tokens):
    """As of a TextDataModule."""
    return {"train": TrainWindows(tokens.numpy(), T, 4, seed=0), "val": ValWindows(tokens.numpy(), T, 4)}


def trainer_of(module, precision="32-true", batch_size=4, windows_of=windows_of, lengths=(T,), **values):
    """The part of a Trainer that the callback uses; the module gets the windows."""
    module.data = SimpleNamespace(batch_size=batch_size, lengths=lengths, windows_of=windows_of)
    return SimpleNamespace(precision=precision, is_global_zero=True, **values)


def failed(module, **options) -> set[str]:
    return {f"{result.check} {result.variant}" for result in certify(module, trainer_of(module, **options)).failures}


ADDED = {  # to the output of attention
    "mean over time": lambda x: x.mean(1, True),
    "rows of the batch mixed": lambda x: 0.1 * x.roll(1, 0),
    "only in the gradient": lambda x: x.roll(-1, 1) - x.roll(-1, 1).detach(),
    "in bf16": lambda x: x.roll(-1, 1) * torch.is_autocast_enabled("cpu"),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_leak_of_attention_is_found(name, monkeypatch):
    def leaking(module, x, **options):
        out = forward(module, x, **options)
        return out + ADDED[name](x)[:, -out.shape[1] :]

    forward, precision = MultiHeadAttention.forward, "bf16-mixed" if name == "in bf16" else "32-true"
    correct = {"window": 4, "attn_dropout": 0.2, "embd_dropout": 0.1}
    assert not failed(module_of(**correct), precision=precision)
    monkeypatch.setattr(MultiHeadAttention, "forward", leaking)
    assert failed(module_of(**correct), precision=precision)


def test_documents_that_are_not_separated_are_found(monkeypatch):
    forward, module = MultiHeadAttention.forward, module_of()
    module.document_eot = 0
    assert not failed(module)
    unseparated = lambda self, x, **options: forward(self, x, **options | {"mask": None})  # noqa: E731
    monkeypatch.setattr(MultiHeadAttention, "forward", unseparated)
    assert failed(module)


@pytest.mark.parametrize(("lengths", "shape", "expected"), [((T,), (4, T), set()), ((10, 20, T), (8, 20), {LEAK})])
def test_a_leak_of_the_loss_is_found_at_each_length_of_the_training_windows(lengths, shape, expected):
    """Of the loss only, as a defect of the compiler would cause."""
    module, shapes = module_of(), set()
    nll = module.nll

    def leaking(ids, y, **more):
        shapes.add(ids.shape)
        return nll(ids, y, **more) + 0.01 * (ids.shape[1] == 20) * ids.float().mean(1, keepdim=True)

    module.nll = leaking
    assert failed(module, lengths=lengths) == expected and shape in shapes


@pytest.mark.parametrize("how", [True, "regional"])
def test_the_compiled_loss_is_certified_in_the_graph_of_a_training_step(graphs, how):
    module = module_of(compile=how, n_layers=1)
    assert certify(module, trainer_of(module, "bf16-mixed", batch_size=6)).passed and len(graphs) == 1
    ids = torch.randint(V, (6, T))
    trainer = Trainer(precision="bf16-mixed", accelerator="cpu", logger=False, enable_checkpointing=False)
    with trainer.precision_plugin.train_step_context():
        module.train().training_step((ids, ids.clone()), 0).backward()
    assert len(graphs) == 1  # the certificate compiled no other graph


def test_weights_in_bf16_are_certified_in_bf16():
    module = module_of()
    module.model.bfloat16()
    assert failed(module, precision="bf16-true") == set()


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("train", lambda x, y: (x, x)),  # not shifted
        ("val", lambda x, y: (y, x)),  # to the past
        ("val", lambda x, y: (torch.cat([y[:, 7:8], x[:, 1:]], dim=1), y)),  # an answer at the start
    ],
)
def test_targets_among_the_inputs_are_found_in_each_part(part, change):
    changed = lambda tokens: (each := windows_of(tokens)) | {part: [change(*batch) for batch in each[part]]}  # noqa: E731
    assert failed(module_of(), windows_of=changed) == {f"shift windows={part}"}


def test_a_loss_that_is_not_that_of_its_logits_is_found():
    module = module_of()
    nll = module.model.nll
    module.model.nll = lambda ids, y, **more: (1 + 0.01 * (y % 2)) * nll(ids, y, **more)
    assert failed(module) == {"targets loss mode=evaluation precision=32-true"}


@pytest.mark.parametrize(
    ("wrong", "state"),
    [
        (lambda out: 1.02 * out, "model precision=32-true"),
        (lambda out: 1.5 * out - 0.5 * out.detach(), "gradients of the loss"),
    ],
)
def test_a_backend_with_other_outputs_or_gradients_is_found(wrong, state, monkeypatch):
    """As kernels of some devices have without an error."""
    fused = BACKENDS["fused"]
    monkeypatch.setitem(BACKENDS, "fused", lambda *inputs: (wrong(fused(*inputs)[0]), None))
    assert failed(module_of(backend="fused")) == {f"equal {state}"}


def test_nothing_else_changes_and_each_validation_adds_two_checks(tmp_path, capsys, monkeypatch):
    module, callback, seeds, original = module_of(attn_dropout=0.1), CausalityCheck(tmp_path), [], check_weights
    monkeypatch.setattr(causality_check, "check_weights", lambda *rest: seeds.append(rest[-1]) or original(*rest))
    module.model.blocks[0].eval()
    before = {name: p.clone() for name, p in module.model.state_dict().items()}
    modes = [part.training for part in module.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    callback.on_fit_start(trainer_of(module), module)
    assert [part.training for part in module.modules()] == modes
    certificate = module.payload["certificate"]
    assert capsys.readouterr().out.startswith("causal  certified in ") and certificate["passed"] is True
    n_checks = certificate["checks"]["future"]
    for step, fn in ((2, "fit"), (4, "fit"), (8, "validate")):  # the last one is not of a training
        values = {"sanity_checking": False, "global_step": step, "max_steps": 8, "should_stop": False}
        callback.on_validation_end(trainer_of(module, state=SimpleNamespace(fn=fn), **values), module)
        assert module.payload["certificate"]["checks"]["future"] == n_checks + 2  # the model, and the loss
        assert module.payload["certificate"]["certified_at_step"] == min(step, 4)
    assert not any(part.training for part in module.modules()), "as Lightning has it at a validation"
    assert capsys.readouterr().out == "" and seeds == [0, 2, 4], "other texts and positions each time"
    assert json.loads((tmp_path / "causality.json").read_text())["checks"] == module.payload["certificate"]["checks"]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, before[name]) for name, p in module.model.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
