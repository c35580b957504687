"""What a run measures: gradient norms against float64 sums, tokens, seconds, losses of windows, and metrics.csv."""

import math
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Callback

from tests.conftest import assert_close, tiny_gpt
from tests.model.training.tiny_fits import CPU, STEPS, B, Before, T, batches, damaged_losses, fit, new_model, new_module
from tril.model.heads.attention_maps import attention_maps
from tril.model.training.callbacks.metrics import Metrics, RunLog, norms_of, save_windows
from tril.model.training.callbacks.output import HeadMetrics
from tril.model.training.errors import NonFiniteError


class Weights(Callback):
    """Keeps the weights before each optimizer step."""

    def __init__(self):
        self.before: list[dict] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.before.append({name: value.clone() for name, value in pl_module.model.state_dict().items()})


def exact_norms(weights: dict, data: list) -> dict[str, float]:
    """Norms of the mean gradient of some batches, computed in float64 by sums over all elements."""
    model = new_model().double()
    model.load_state_dict(weights)
    sum(model.nll(*each).mean() for each in data).div(len(data)).backward()
    squares = {"total": 0.0, "muon": 0.0, "decay": 0.0, "no_decay": 0.0}
    for name, parameter in model.named_parameters():
        group = "muon" if "blocks." in name and parameter.ndim == 2 else "decay" if parameter.ndim == 2 else "no_decay"
        square = sum(value**2 for value in parameter.grad.flatten().tolist())
        squares[group] += square
        squares["total"] += square
    return {name: math.sqrt(square) for name, square in squares.items()}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_norms_are_those_of_the_gradient_before_clipping(accumulate):
    weights = Weights()
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1e-3, "limit_val_batches": 0}
    trainer = fit(new_module(new_model()), weights, log_every_n_steps=3, **options)
    rows = Metrics.of(trainer).rows("train/loss")
    assert [row["step"] for row in rows] == [3, 6, 8], "every third, and the last"
    data = batches(STEPS * accumulate)
    for row in rows:
        expected = exact_norms(weights.before[row["step"] - 1], data[(row["step"] - 1) * accumulate :][:accumulate])
        assert {name: row[f"grad_norm/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_frozen_and_unused_parameters_have_no_gradient():
    model = new_model(pos="learned")
    model.embed.requires_grad_(False)
    assert Metrics.of(fit(new_module(model))).last("train/loss")["grad_norm/total"] > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_made(value):
    module, weights = damaged_losses(new_module(new_model()), {5: value}), Weights()
    with pytest.raises(NonFiniteError, match="step 6 is not finite: .* the weights stay those of step 5"):
        fit(module, weights)
    assert all(torch.equal(value, weights.before[5][name]) for name, value in module.model.state_dict().items())


def test_an_infinite_loss_with_a_finite_gradient_is_not_used():
    module = new_module(new_model())
    nll = module.losses.compiled
    module.losses.compiled = lambda *batch, **options: nll(*batch, **options) + math.inf
    with pytest.raises(NonFiniteError, match="step 1 is not finite: loss inf"):
        fit(module)


def test_norms_of_bf16_gradients_are_summed_in_float32():
    """4,096 equal elements: a running sum in bf16 stops growing at 256 of them."""
    (norm,) = norms_of((torch.full((4096,), 0.5, dtype=torch.bfloat16),))
    assert_close(norm, torch.tensor(32.0))


def test_tokens_are_counted_over_a_change_of_the_size_of_a_step(tmp_path):
    """Five steps of one micro-batch; then the sixth, and two of two."""
    path = tmp_path / "middle.ckpt"
    fit(new_module(new_model()), Before(6, lambda module: module.trainer.save_checkpoint(path)))
    trainer = fit(new_module(new_model()), checkpoint=path, done=5, accumulate_grad_batches=2)
    assert Metrics.of(trainer).tokens == B * T * (5 + 1 + 2 * 2)


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
    resumed.on_train_batch_start(None, None, None, 0)
    assert (metrics.seconds(), resumed.seconds(), resumed.wall_seconds()) == (3, 5, 92 + 3)


def test_losses_of_windows_and_documents(tmp_path):
    module = SimpleNamespace(
        val_windows=torch.tensor([[6.0, 3], [4, 2]], dtype=torch.float64),
        val_nll=torch.tensor([1.0, 2, 3, 4, 5, 6]),
        val_documents=lambda n: np.array([0, 0, 0, 1, 1, 3])[:n],  # document 2 has no token
        val_targets=[6],
        model=SimpleNamespace(config=SimpleNamespace(context_length=4)),
    )
    save_windows(tmp_path / "windows.npz", module, 30)
    found = {name: array.tolist() for name, array in np.load(tmp_path / "windows.npz").items()}
    assert found == {"step": 30, "context_length": 4, "nll": [6, 3], "targets": [4, 2]} | {
        "document_nll": [6, 9, 0, 6], "document_targets": [3, 2, 0, 1]
    }  # fmt: skip


def test_a_resumed_run_continues_its_csv_file_with_the_rows_of_its_checkpoint(tmp_path):
    metrics, resumed = Metrics(CPU, tmp_path), Metrics(CPU, tmp_path)
    metrics.run_log.log_metrics({"loss": 3.0}, step=2)
    metrics.run_log.log_metrics({"loss": 2.0, "norm": 7.0}, step=4)
    state = metrics.state_dict()
    metrics.run_log.log_metrics({"loss": 1.0}, step=6)
    file = tmp_path / "csv" / "version_0" / "metrics.csv"
    file.write_text(file.read_text() + "9,2")  # killed within a row
    resumed.load_state_dict(state)
    resumed.run_log.log_metrics({"loss": 1.5}, step=6)
    resumed.run_log.log_metrics({"val": 9.0}, step=6)
    assert file.read_text().replace("\r", "") == "loss,norm,step,val\n3.0,,2,\n2.0,7.0,4,\n1.5,,6,\n,,6,9.0\n"
    assert not list(file.parent.glob(".*"))
    RunLog(tmp_path).log_metrics({"loss": 5.0}, step=1)
    assert file.read_text().replace("\r", "") == "loss,step\n5.0,1\n"


def logged_heads(model, ids, document_eot=None) -> dict[str, float]:
    logged = {}
    logger = SimpleNamespace(log_metrics=lambda metrics, step: logged.update(metrics))
    data = SimpleNamespace(first_val_windows=lambda n: (ids[:n], ids[:n]))
    trainer = SimpleNamespace(is_global_zero=True, datamodule=data, loggers=[logger], global_step=7)
    losses = SimpleNamespace(document_eot=document_eot)
    module = SimpleNamespace(model=model, whole_model=lambda: model, losses=losses)
    HeadMetrics().on_validation_end(trainer, module)
    return logged


def test_entropy_and_first_token_mass_of_every_head_over_the_first_windows():
    model = tiny_gpt(attn_dropout=0.5).train()
    ids = torch.randint(31, (3, 12))
    logged = logged_heads(model, ids)
    # (L, B, H, T - 1, T): without the first position, which has no choice
    maps = attention_maps(model, ids[:2]).double()[:, :, :, 1:]
    for layer in range(2):
        for head in range(4):
            rows = maps[layer, :, head].flatten(0, 1)
            nats = -sum(w * w.log() for w in rows.flatten() if w > 0) / len(rows)
            assert logged[f"heads/entropy/L{layer}H{head}"] == pytest.approx(nats.item(), rel=1e-5)
            assert logged[f"heads/first/L{layer}H{head}"] == pytest.approx(rows[:, 0].mean().item(), rel=1e-5)
    assert len(logged) == 2 * 2 * 4 and model.training


def test_every_document_of_a_window_has_a_first_token():
    model = tiny_gpt()
    ids = torch.randint(1, 31, (1, 12))
    ids[0, 5] = 0
    logged = logged_heads(model, ids, document_eot=0)
    first, second = (attention_maps(model, part)[0, 0, 0, 1:, 0] for part in (ids[:, :5], ids[:, 5:]))
    assert logged["heads/first/L0H0"] == pytest.approx(torch.cat([first, second]).mean().item(), rel=1e-5)
