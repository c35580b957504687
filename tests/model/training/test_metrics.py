"""What a run measures: gradient norms against float64 sums, tokens, seconds, and metrics.csv."""

import math
import signal
import tempfile
import time

import pytest
import torch
from lightning import Callback, Trainer

from tests.conftest import tiny_gpt, training_module
from tests.contract.harness import train
from tril.model.training.callbacks.metrics import Metrics, NonFiniteError
from tril.model.training.hardware import Hardware
from tril.model.training.module import TrainingModule
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import lr_factor
from tril.model.training.settings import ScheduleConfig

V, T, B, STEPS = 31, 12, 2, 8
CPU = Hardware("cpu", "32-true", False, "a CPU", None)
BARE = ("~callbacks.samples", "~callbacks.heads", "~callbacks.causality")


def batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets, (B, T) each."""
    ids = torch.randint(V, (n, B, T + 1), generator=torch.Generator().manual_seed(1))
    return [(each[:, :-1], each[:, 1:]) for each in ids]


def new_module() -> TrainingModule:
    """Its rates of 1e-30 leave the weights of all steps at the first ones."""
    torch.manual_seed(0)
    return training_module(tiny_gpt(tie_embeddings=False).train(), STEPS, OptimConfig(lr_scale=1e-30))


class Loader(list):
    """Batches of a text, as many as it has windows."""

    batch_size, world_size = B, 1
    n_windows = property(lambda self: B * len(self))


def fit(module: TrainingModule, *, checkpoint=None, steps: int = STEPS, **options) -> Metrics:
    """Trains on `batches`, in their order."""
    metrics = Metrics(CPU, tempfile.mkdtemp())
    options = {"accelerator": "cpu", "logger": metrics.run_log, "log_every_n_steps": 3, **options}
    options |= dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    metrics.trainer = Trainer(callbacks=[metrics], max_steps=steps, **options)
    train = Loader(batches(STEPS * metrics.trainer.accumulate_grad_batches))
    metrics.trainer.fit(module, train, ckpt_path=checkpoint, weights_only=True)
    return metrics


def exact_norms(data: list) -> dict[str, float]:
    """Norms of the mean gradient of some batches, in float64."""
    model = new_module().model.double()
    sum(model.nll(*each).mean() for each in data).div(len(data)).backward()
    squares = {"total": 0.0, "muon": 0.0, "decay": 0.0, "no_decay": 0.0}
    for name, parameter in model.named_parameters():
        group = "muon" if "blocks." in name and parameter.ndim == 2 else "decay" if parameter.ndim == 2 else "no_decay"
        for key in ("total", group):
            squares[key] += parameter.grad.square().sum().item()
    return {name: math.sqrt(square) for name, square in squares.items()}


def test_norms_are_those_of_the_gradient_before_clipping():
    accumulate = 3
    rows = fit(new_module(), accumulate_grad_batches=accumulate, gradient_clip_val=1e-3).rows("train/loss")
    assert [row["step"] for row in rows] == [3, 6, 8], "every third, and the last"
    data = batches(STEPS * accumulate)
    for row in rows:
        expected = exact_norms(data[(row["step"] - 1) * accumulate :][:accumulate])
        assert {name: row[f"grad_norm/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_learning_rates_are_those_of_the_step_of_their_row():
    for row in fit(new_module()).rows("train/loss"):
        factor = lr_factor(row["step"] - 1, STEPS, ScheduleConfig())  # which counts from 0
        assert row["lr/muon"] == pytest.approx(1e-30 * OptimConfig().muon_lr * factor, rel=1e-9, abs=0)


def test_a_step_whose_loss_alone_is_not_finite_is_not_made():
    module = new_module()
    nll = module.nll
    module.nll = lambda *batch, **options: nll(*batch, **options) + math.inf  # with a finite gradient
    with pytest.raises(NonFiniteError, match="step 1 .*loss inf"):
        fit(module)


def test_tokens_are_counted_over_a_change_of_the_size_of_a_step(tmp_path):
    fit(new_module(), steps=5).trainer.save_checkpoint(tmp_path / "middle.ckpt")
    metrics = fit(new_module(), checkpoint=tmp_path / "middle.ckpt", accumulate_grad_batches=2)
    assert metrics.tokens == B * T * (5 + 1 + 2 * 2)  # the sixth step has one micro-batch, as the epoch goes on


def test_seconds_are_those_of_training_and_survive_a_checkpoint(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics, resumed = Metrics(CPU, tmp_path, started=-2.0), Metrics(CPU, tmp_path, started=89.0)
    metrics.on_train_batch_start(None, None, None, 0)
    now[0] = 3.0
    metrics.on_validation_start(None, None)
    now[0] = 90.0  # at the end of the validation the checkpoint is written
    resumed.load_state_dict(metrics.state_dict())
    resumed.on_train_batch_start(None, None, None, 0)
    now[0] = 92.0
    assert (metrics.seconds(), resumed.seconds(), resumed.wall_seconds()) == (3, 5, 92 + 3)


class Logging(Callback):
    """Logs as callbacks of Lightning do."""

    def on_train_batch_end(self, trainer, module, *rest):
        self.log("train/of_callback", float(trainer.global_step))

    def on_train_epoch_end(self, trainer, module):
        self.log("train/of_pass", float(trainer.global_step))

    def on_validation_epoch_end(self, trainer, module):
        self.log("val/of_callback", float(trainer.global_step))


def test_self_log_writes_rows_of_its_step_and_a_stopped_run_keeps_them(train_tiny, tmp_path, monkeypatch):
    """SIGTERM comes in step 2, whose checkpoint is written before Lightning logs that step."""
    step, signals = TrainingModule.training_step, [signal.SIGTERM]

    def training_step(self, batch, batch_idx):
        self.log("train/of_module", float(self.trainer.global_step + 1))
        if self.trainer.global_step == 1 and signals:
            signal.raise_signal(signals.pop())
        return step(self, batch, batch_idx)

    monkeypatch.setattr(TrainingModule, "training_step", training_step)
    target = f"+callbacks.logging._target_={__name__}.Logging"
    with pytest.raises(KeyboardInterrupt):
        train_tiny(*BARE, target, "trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=2")
    run = train(f"resume={tmp_path / 'run'}", target, base=())
    logged = [(name, row["step"], x) for row in run.metrics for name, x in row.items() if "/of_" in name]
    trained = [(f"train/of_{who}", step, step) for step in (2, 4, 6, 8) for who in ("callback", "module")]
    assert sorted(logged) == sorted(
        [*trained, ("train/of_pass", 8, 8), ("val/of_callback", 4, 4), ("val/of_callback", 8, 8)]
    )
    assert all("epoch" not in row for row in run.metrics)
