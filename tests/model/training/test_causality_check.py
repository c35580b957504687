"""The short certificate before the first step: what it finds, that it changes nothing, and that a leak ends the run."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning import Trainer

from tests.conftest import randomize
from tril.data.batches import TrainWindows, ValWindows
from tril.model.causality.certificate import Certificate
from tril.model.gpt import GPT, Block, GPTConfig
from tril.model.training.callbacks.causality_check import CausalityCheck, CausalityError, certify, check_weights
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig

TINY = {"vocab_size": 31, "context_length": 40, "n_layers": 2, "dim": 32, "n_heads": 4}
EOT = 0


def module_of(model=None, *, document_eot=None, compile=None, **choices):
    model = model or GPT(GPTConfig(**TINY | choices))
    settings = {"total_steps": 100, "val_bytes": {"": float}, "compile": compile, "document_eot": document_eot}
    return TrainingModule(model, OptimConfig(), payload={}, **settings)


class TinyData:
    """The part of a TextDataModule that the callback uses."""

    batch_size = 4

    @staticmethod
    def windows_of(tokens):
        ids = tokens.numpy()
        return {"train": TrainWindows(ids, 40, 4, seed=0), "val": ValWindows(ids, 40, 4)}


def certificate_of(module, precision="32-true", batch_size=4, windows_of=TinyData.windows_of) -> Certificate:
    data = SimpleNamespace(batch_size=batch_size, windows_of=windows_of)
    return certify(module.losses, SimpleNamespace(precision=precision, datamodule=data))


def failed(certificate) -> set[str]:
    return {f"{result.check} {result.variant}" for result in certificate.failures}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "choices",
    [{}, {"window": 5, "pos": "learned"}, {"attn_dropout": 0.2, "resid_dropout": 0.1, "embd_dropout": 0.1}],
    ids=str,
)
def test_causal_models_pass(choices, precision):
    certificate = certificate_of(module_of(**choices), precision)
    assert certificate.passed, certificate.failures
    assert set(certificate.checks()) == {"future", "equal", "gradient", "targets", "shift"}


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_small_batches_pass(batch_size):
    assert certificate_of(module_of(), "bf16-mixed", batch_size).passed


def test_separate_documents_pass():
    """That documents which are not separate fail is in tests/contract."""
    assert certificate_of(module_of(document_eot=EOT)).passed


def leaking_block(forward):
    """Adds a hundredth of the next position's state to each, outside of attention."""

    def leaky(self, x, **kwargs):
        x = forward(self, x, **kwargs)
        return x + 0.01 * torch.cat((x[:, 1:], x[:, :1]), dim=1)

    return leaky


def batch_norm_over_rows(forward):
    return lambda self, x, **kwargs: forward(self, x - x.mean(0, keepdim=True), **kwargs)


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        (lambda patch: patch.setattr(Block, "forward", leaking_block(Block.forward)), "future"),
        (lambda patch: patch.setattr(Block, "forward", batch_norm_over_rows(Block.forward)), "future"),
        (
            lambda patch: patch.setattr(
                "tril.model.attention.causal_mask", lambda t, s, **_: torch.ones(t, s).tril(1).bool()
            ),
            "future",
        ),
    ],
    ids=["leak outside attention", "rows mixed", "mask too wide"],
)
def test_mutants_fail_the_named_check(mutate, check, monkeypatch):
    mutate(monkeypatch)
    assert check in {name.split()[0] for name in failed(certificate_of(module_of(backend="explicit")))}


def leak_at(position):
    """The output at one position sees the next token, and no other output sees a later one."""
    forward = Block.forward

    def leaky(self, x, **kwargs):
        x = forward(self, x, **kwargs)
        if x.shape[1] <= position + 1:
            return x
        return x + 0.01 * F.one_hot(torch.tensor(position), x.shape[1])[:, None] * x[:, position + 1 : position + 2]

    return leaky


@pytest.mark.parametrize("position", [13, 27, 36])
def test_a_leak_at_one_position_is_found(position, monkeypatch):
    monkeypatch.setattr(Block, "forward", leak_at(position))
    assert f"output {position} " in certificate_of(module_of()).failures[0].where


def test_every_validation_tests_other_positions():
    module = module_of()
    randomize(module.model)
    nll = module.losses.compiled

    def leaking(ids, targets, **kwargs):
        losses = nll(ids, targets, **kwargs)
        return losses + 0.01 * F.one_hot(torch.tensor(21), 40) * ids[:, 22:23]

    module.losses.compiled = leaking
    found = [any(not r.passed for r in check_weights(module.losses, "32-true", 8, 8, seed)) for seed in range(60)]
    assert 1 <= sum(found) < 60


def test_a_leak_of_the_loss_only_is_found():
    """As a defect of the compiler would cause."""
    module = module_of()
    nll = module.losses.compiled
    module.losses.compiled = lambda ids, targets, **kwargs: (
        nll(ids, targets, **kwargs) + 0.01 * ids.float().mean(1, keepdim=True)
    )
    assert failed(certificate_of(module)) == {"future loss precision=32-true"}


@pytest.mark.parametrize("how", ["default", "regional"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("batch_size", [4, 6])
def test_the_compiled_loss_is_certified_in_the_graph_of_a_training_step(monkeypatch, precision, how, batch_size):
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiler(function, backend=counting, **options))
    torch._dynamo.reset()
    module = module_of(compile=how)
    assert certificate_of(module, precision, batch_size).passed
    assert len(graphs) == 1
    ids = torch.randint(31, (batch_size, 40))
    module.train()
    with Trainer(
        precision=precision, accelerator="cpu", logger=False, enable_checkpointing=False
    ).precision_plugin.train_step_context():
        module.training_step((ids, ids.clone()), 0).backward()
    assert len(graphs) == 1  # the certificate compiled no other graph


def start(callback, module):
    """The call that Lightning makes before the first step."""
    trainer = SimpleNamespace(precision="32-true", datamodule=TinyData, is_global_zero=True)
    callback.on_fit_start(trainer, module)


def test_weights_modes_and_random_numbers_are_restored(tmp_path, capsys):
    module = module_of(attn_dropout=0.1)
    module.model.blocks[0].eval()
    before = {name: p.clone() for name, p in module.model.state_dict().items()}
    modes = [part.training for part in module.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    start(CausalityCheck(tmp_path), module)
    assert torch.equal(torch.rand(3), expected)
    assert [part.training for part in module.modules()] == modes
    after = module.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in module.parameters())
    assert module.certificate["passed"] is True
    assert json.loads((tmp_path / "causality.json").read_text())["checks"] == module.certificate["checks"]
    assert capsys.readouterr().out.startswith("causal: certified in ")


def test_a_leaking_model_is_refused_unless_allowed(tmp_path):
    module = module_of(causal=False)
    with pytest.raises(
        CausalityError, match=r"future: output \d+ depends on input \d+, first in .*attn.*causality.allow_leak=true"
    ):
        start(CausalityCheck(tmp_path), module)
    module = module_of(causal=False)
    start(CausalityCheck(tmp_path, allow_leak=True), module)
    assert module.certificate["passed"] is False
    assert json.loads((tmp_path / "causality.json").read_text())["passed"] is False


def validated(callback, module, step, *, fn="fit"):
    """The call that Lightning makes after a validation."""
    trainer = SimpleNamespace(
        precision="32-true",
        datamodule=TinyData,
        is_global_zero=True,
        sanity_checking=False,
        global_step=step,
        max_steps=8,
        should_stop=False,
        state=SimpleNamespace(fn=fn),
    )
    callback.on_validation_end(trainer, module)


@pytest.mark.parametrize("step", [4, 8])
def test_a_mask_that_comes_off_while_training_stops_the_run_at_the_next_validation(tmp_path, step, capsys):
    module = module_of(backend="explicit")
    randomize(module.model)  # as after some steps: the zeros of an initial model hide a leak
    callback = CausalityCheck(tmp_path)
    start(callback, module)
    capsys.readouterr()
    validated(callback, module, 4)
    assert module.certificate["passed"] is True and capsys.readouterr().out == ""
    module.model.blocks[1].attn.causal = False
    with pytest.raises(CausalityError, match=r"first in blocks\.1\.attn; model precision"):
        validated(callback, module, step)
    assert module.certificate["passed"] is False
    assert json.loads((tmp_path / "causality.json").read_text())["passed"] is False


def test_validations_test_the_current_weights_and_change_nothing(tmp_path):
    module = module_of(attn_dropout=0.1)
    callback = CausalityCheck(tmp_path)
    start(callback, module)
    counts = module.certificate["checks"]["future"]
    modes = [part.training for part in module.modules()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for step in (2, 4, 8):
        validated(callback, module, step)
        assert module.certificate["checks"]["future"] == counts + 2  # the model, and the loss
    assert torch.equal(torch.rand(3), expected)
    assert [part.training for part in module.modules()] == modes
    validated(callback, module, 8, fn="validate")
    assert module.certificate["passed"]


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
    assert failed(certificate_of(module_of(), windows_of=windows_with(part, change))) == {f"shift windows={part}"}


def nll_with(hint):
    """A loss whose logits get a hint that depends on targets (B, T) -> (B, T, V)."""

    def nll(self, ids, targets, **kwargs):
        logits = self(ids, **{key: kwargs[key] for key in kwargs if key != "run_block"})
        logits = logits + hint(self, ids, targets.clamp(min=0))
        return F.cross_entropy(logits.mT.float(), targets, ignore_index=-100, reduction="none")

    return nll


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hint", [lambda y: 3.0 * F.one_hot(y.roll(-1, 1), 31), lambda y: 3.0 * F.one_hot(y, 31)])
def test_a_loss_that_knows_targets_is_found_in_the_mode_in_which_it_does(hint, training, monkeypatch):
    monkeypatch.setattr(GPT, "nll", nll_with(lambda model, _, y: hint(y) if model.training is training else 0.0))
    assert failed(certificate_of(module_of())) == {f"targets loss mode={'training' if training else 'evaluation'}"}


@pytest.mark.parametrize("inference", [False, True])
def test_a_step_that_overwrites_its_batch_is_refused(inference, tmp_path):
    """Targets that are copied into the inputs of the same tensors, in training and in validation."""
    module, callback = module_of(), CausalityCheck(tmp_path)
    start(callback, module)
    trainer = SimpleNamespace(is_global_zero=True, global_step=3)
    with torch.inference_mode(inference):
        batch = torch.randint(31, (4, 40)), torch.randint(31, (4, 40))
        begin = callback.on_validation_batch_start if inference else callback.on_train_batch_start
        end = callback.on_validation_batch_end if inference else callback.on_before_backward
        begin(trainer, module, batch, 0)
        module.losses(batch)
        end(trainer, module)
        batch[0].copy_(batch[1])
        module.losses(batch)
        with pytest.raises(CausalityError, match="passes other inputs or targets than those of its batch"):
            end(trainer, module)
