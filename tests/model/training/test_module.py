"""The Lightning module: its loss with ignored targets, over micro-batches, after resuming, and with compilation."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from lightning import Trainer
from torch.utils.data import DataLoader

from tests.conftest import tiny_gpt, training_module
from tril.data.batches import IGNORE
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import ScheduleConfig

V, T = 31, 12
EOT = 7  # opens a document, at about every fourth position


def batches(n, share=1.0):
    """Inputs and targets, (4, T) each; a `share` of the targets counts, and of the second batch none."""
    random, found = torch.Generator().manual_seed(0), []
    for i in range(n):
        ids = torch.randint(V, (4, T + 1), generator=random)
        ids = ids.masked_fill(torch.rand(ids.shape, generator=random) < 0.25, EOT)
        counts = torch.rand((4, T), generator=random) < share * (i != 1 or share == 1)
        found.append((ids[:, :-1], ids[:, 1:].masked_fill(~counts, IGNORE)))
    return found


def module(compile=False, steps=6, document_eot=None, **choices):
    torch.manual_seed(0)
    model = tiny_gpt(**{"tie_embeddings": False} | choices)
    optim = OptimConfig(schedule=ScheduleConfig(warmup_steps=2))
    return training_module(model, steps, optim, compile=compile, document_eot=document_eot)


def test_every_target_has_the_same_weight_over_micro_batches():
    """The sum over three micro-batches, one without targets, is the gradient of all targets in one batch."""
    data, lm = batches(3, share=0.3), module()
    for part in data:
        (lm.training_step(part, 0) / len(data)).backward()
    inputs, targets = (torch.cat(parts) for parts in zip(*data, strict=True))
    loss = torch.nn.functional.cross_entropy(lm.model(inputs).mT, targets, ignore_index=IGNORE, reduction="sum")
    expected = torch.autograd.grad(loss / targets.numel(), [*lm.model.parameters()])
    torch.testing.assert_close([p.grad for p in lm.model.parameters()], [*expected], rtol=1e-3, atol=1e-6)


def test_rank_0_continues_the_sums_of_the_logged_loss_of_all_ranks(monkeypatch):
    saved, checkpoint = module(), {}
    monkeypatch.setattr(saved, "all_gather", lambda x: torch.stack([x, x + 1]))
    saved.train_sums = torch.tensor([3.0, 5.0])
    saved.on_save_checkpoint(checkpoint)
    for rank, sums in enumerate([[7.0, 11.0], [0.0, 0.0]]):
        resumed = module()
        resumed._trainer = SimpleNamespace(global_rank=rank)
        resumed.on_load_checkpoint(checkpoint)
        assert resumed.train_sums.tolist() == sums


def fit(module):
    """The content of a checkpoint."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_steps=3, accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(batches(3), batch_size=None))
    return trainer._checkpoint_connector.dump_checkpoint()


@pytest.mark.parametrize("how", [True, "regional"])
def test_a_checkpoint_is_the_same_with_and_without_compilation(graphs, how):
    """One graph is captured, of the loss or of a block."""
    choices = {"document_eot": EOT, "pos": "learned", "window": 3}
    with mock.patch.object(torch.compiler, "is_compiling", lambda: how is True):  # cross_entropy has two forms
        plain = fit(module(**choices))
    compiled = fit(module(compile=how, **choices))
    assert len(graphs) == 1
    assert compiled["state_dict"].keys() == plain["state_dict"].keys() and compiled["tril"] == plain["tril"]
    for name, tensor in plain["state_dict"].items():
        assert torch.equal(tensor, compiled["state_dict"][name]), name


@pytest.mark.parametrize("how", [True, "regional"])
def test_validation_runs_compiled_code(graphs, how):
    lm = module(compile=how).eval()
    lm._trainer = SimpleNamespace(num_val_batches=[1])
    with torch.no_grad():
        lm.validation_step(batches(1)[0], 0)
    assert len(graphs) == 1


def test_more_models_are_compiled_than_the_recompile_limit_allows(graphs):
    with torch._dynamo.config.patch(recompile_limit=1):
        for dim in (16, 24, 32):
            module(compile=True, dim=dim, n_layers=1).train().losses(batches(1)[0])
    assert len(graphs) == 3


def test_validation_keeps_the_losses_of_all_processes_in_the_order_of_the_text(monkeypatch):
    """Two processes alternate; a window that is all IGNORE fills up a batch."""
    lm, other = module(), module()
    [(inputs, targets)] = batches(1, share=0.4)
    targets[3] = IGNORE
    for process, rows in ((lm, [0, 2]), (other, [1, 3])):
        process._trainer = SimpleNamespace(num_val_batches=[2], logged_metrics={})
        with torch.no_grad():
            process.validation_step((inputs[rows], targets[rows]), 0)
    other_rows = other._val
    monkeypatch.setattr(lm, "log_dict", lambda *args, **kwargs: None)
    monkeypatch.setattr(lm, "all_gather", lambda rows: torch.stack([rows, other_rows]))
    lm.on_validation_epoch_end()
    every, counts = lm.model.nll(inputs, targets).detach(), targets != IGNORE  # (4, T)
    expected = torch.stack([(every * counts).sum(1), counts.sum(1)])[:, :3]
    torch.testing.assert_close(lm.val_windows, expected.double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(lm.val_nll, every[counts])
