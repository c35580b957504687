"""The short certificate before the first step: what it finds, that it changes nothing, and that a leak ends the run."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning import Trainer

from tests.conftest import NANO_PARTS
from tril.data.batches import TrainWindows, ValWindows
from tril.model.attention import BACKENDS
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.callbacks import causality_check
from tril.model.training.callbacks.causality_check import CausalityCheck, certify
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig

V, T = 31, 40


def module_of(*, document_eot=None, compile=None, **choices):
    model = GPT(GPTConfig(V, **{"context_length": T, "n_layers": 2, "dim": 32, "n_heads": 4} | NANO_PARTS | choices))
    settings = {"total_steps": 100, "val_bytes": float, "compile": compile, "document_eot": document_eot}
    return TrainingModule(model, OptimConfig(), payload={}, **settings)


def windows_of(tokens):
    """As of a TextDataModule."""
    ids = tokens.numpy()
    return {"train": TrainWindows(ids, T, 4, seed=0), "val": ValWindows(ids, T, 4)}


def trainer_of(precision="32-true", batch_size=4, windows_of=windows_of, lengths=(T,), **values):
    """The part of a Trainer that the callback uses."""
    data = SimpleNamespace(batch_size=batch_size, lengths=lengths, windows_of=windows_of)
    return SimpleNamespace(precision=precision, datamodule=data, is_global_zero=True, **values)


def failed(module, **options) -> set[str]:
    return {f"{result.check} {result.variant}" for result in certify(module, trainer_of(**options)).failures}


def test_a_leak_of_the_loss_only_is_found():
    """As a defect of the compiler would cause."""
    module = module_of()
    nll = module.nll
    module.nll = lambda ids, y, **more: nll(ids, y, **more) + 0.01 * ids.float().mean(1, keepdim=True)
    assert failed(module) == {"future loss precision=32-true"}


def test_the_loss_is_certified_at_each_length_of_the_training_windows():
    module, shapes = module_of(), set()
    nll = module.nll

    def leaking(ids, y, **more):
        shapes.add(ids.shape)
        return nll(ids, y, **more) + 0.01 * (ids.shape[1] == 20) * ids.float().mean(1, keepdim=True)

    module.nll = leaking
    assert not failed(module) and shapes == {(4, T)}
    assert failed(module, lengths=(10, 20, T)) == {"future loss precision=32-true"}
    assert shapes == {(16, 10), (8, 20), (4, T)}


@pytest.mark.parametrize("how", ["default", "regional"])
def test_the_compiled_loss_is_certified_in_the_graph_of_a_training_step(monkeypatch, how):
    graphs, compiler = [], torch.compile
    backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=backend, **options))
    torch._dynamo.reset()
    module = module_of(compile=how, n_layers=1)
    assert certify(module, trainer_of("bf16-mixed", batch_size=6)).passed and len(graphs) == 1
    ids = torch.randint(V, (6, T))
    trainer = Trainer(precision="bf16-mixed", accelerator="cpu", logger=False, enable_checkpointing=False)
    with trainer.precision_plugin.train_step_context():
        module.train().training_step((ids, ids.clone()), 0).backward()
    assert len(graphs) == 1  # the certificate compiled no other graph


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("train", lambda x, y: (x, x)),  # not shifted
        ("val", lambda x, y: (y, x)),  # to the past
        ("val", lambda x, y: (torch.cat([y[:, 7:8], x[:, 1:]], dim=1), y)),  # an answer at the start
    ],
)
def test_targets_among_the_inputs_are_found_in_each_part(part, change):
    def changed(tokens):
        batches = windows_of(tokens)
        return batches | {part: [change(*batch) for batch in batches[part]]}

    assert failed(module_of(), windows_of=changed) == {f"shift windows={part}"}


@pytest.mark.parametrize(("training", "shift"), [(True, -1), (False, 0)])
def test_a_loss_that_knows_targets_is_found_in_the_mode_in_which_it_does(training, shift, monkeypatch):
    def nll(self, ids, targets, **kwargs):
        logits = self(ids, **{key: kwargs[key] for key in kwargs if key != "run_block"})
        if self.training is training:
            logits = logits + 3.0 * F.one_hot(targets.clamp(min=0).roll(shift, 1), V)
        return F.cross_entropy(logits.mT.float(), targets, ignore_index=-100, reduction="none")

    monkeypatch.setattr(GPT, "nll", nll)
    assert failed(module_of()) == {f"targets loss mode={'training' if training else 'evaluation'}"}


def test_a_backend_that_computes_something_else_is_found(monkeypatch):
    """As kernels of some devices do without an error."""
    fused = BACKENDS["fused"]

    def wrong(*inputs):
        out, weights = fused(*inputs)
        return 1.02 * out, weights

    monkeypatch.setitem(BACKENDS, "fused", wrong)
    assert failed(module_of(backend="fused")) == {"equal model precision=32-true"}


# --- the callback


def start(callback, module):
    """The call that Lightning makes before the first step."""
    callback.on_fit_start(trainer_of(), module)


def validated(callback, module, step, *, fn="fit"):
    """The call that Lightning makes after a validation."""
    values = {"sanity_checking": False, "global_step": step, "max_steps": 8, "should_stop": False}
    callback.on_validation_end(trainer_of(state=SimpleNamespace(fn=fn), **values), module)


def test_weights_modes_and_random_numbers_are_restored_at_the_start_and_after_validations(
    tmp_path, capsys, monkeypatch
):
    module, callback, seeds = module_of(attn_dropout=0.1), CausalityCheck(tmp_path), []
    module.model.blocks[0].eval()
    before = {name: p.clone() for name, p in module.model.state_dict().items()}
    modes, original = [part.training for part in module.modules()], causality_check.check_weights
    monkeypatch.setattr(causality_check, "check_weights", lambda *rest: seeds.append(rest[-1]) or original(*rest))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start(callback, module)
    assert (
        capsys.readouterr().out.startswith("causal: certified in ") and module.payload["certificate"]["passed"] is True
    )
    counts = module.payload["certificate"]["checks"]["future"]
    for step in (2, 4):
        validated(callback, module, step)
        assert module.payload["certificate"]["checks"]["future"] == counts + 2  # the model, and the loss
    validated(callback, module, 8, fn="validate")  # not while training
    assert seeds == [2, 4] and capsys.readouterr().out == "", "other texts and positions each time"
    assert json.loads((tmp_path / "causality.json").read_text())["checks"] == module.payload["certificate"]["checks"]
    assert torch.equal(torch.rand(3), expected) and [part.training for part in module.modules()] == modes
    assert all(torch.equal(p, before[name]) for name, p in module.model.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
