"""Gradient norms against float64 sums, their rows, and what survives a checkpoint."""

import math

import pytest
import torch
from lightning import Callback
from pydantic import ValidationError

from tests.conftest import assert_close
from tests.model.training.tiny_fits import STEPS, Before, batches, damaged_losses, fit, new_model, new_module
from tril.model.training.callbacks.gradient_norms import GradientNorms
from tril.model.training.callbacks.metrics import Metrics


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
def test_norms_are_those_of_the_gradient_before_clipping(accumulate, monkeypatch):
    written = []
    monkeypatch.setattr(Metrics, "write", staticmethod(lambda trainer, row: written.append((trainer.global_step, row))))
    callback, weights = GradientNorms(), Weights()
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1e-3, "limit_val_batches": 0}
    fit(new_module(new_model()), callback, weights, log_every_n_steps=3, **options)
    assert [row["step"] for row in callback.rows] == [3, 6, 8], "every third, and the last"
    data = batches(STEPS * accumulate)
    for row in callback.rows:
        step = row["step"]
        expected = exact_norms(weights.before[step - 1], data[(step - 1) * accumulate : step * accumulate])
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert (step, {f"grad_norm/{name}": row[name] for name in expected}) in written


def test_frozen_and_unused_parameters_have_no_gradient():
    model = new_model(pos="learned")
    model.embed.requires_grad_(False)
    callback = GradientNorms()
    fit(new_module(model), callback)
    assert callback.rows[-1]["total"] > 0


def test_rows_and_skips_of_a_resumed_run_are_those_of_a_whole_one(tmp_path):
    def run(callback, checkpoint=None):
        module = new_module(new_model())
        damaged_losses(module, {1: math.nan, 5: math.nan})
        save = Before(5, lambda pl_module: pl_module.trainer.save_checkpoint(tmp_path / "middle.ckpt"))
        fit(module, callback, *([] if checkpoint else [save]), checkpoint=checkpoint, done=4 if checkpoint else 0)
        return callback

    whole = run(GradientNorms("skip"))
    saved = torch.load(tmp_path / "middle.ckpt", weights_only=True)["callbacks"]["GradientNorms"]
    assert [row["step"] for row in saved["rows"]] == [4] and saved["skipped"] == [2]
    resumed = run(GradientNorms("skip"), tmp_path / "middle.ckpt")
    assert resumed.state_dict() == whole.state_dict()
    assert whole.skipped == [2, 6] and [row["step"] for row in whole.rows] == [4, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"on_nonfinite": "maybe"}, "on_nonfinite"), ({"max_skips": 0}, "max_skips"), ({"max_skips": True}, "max_skips")],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValidationError, match=message):
        GradientNorms(**settings)


def test_norms_of_bf16_gradients_are_summed_in_float32():
    """4,096 equal elements: a running sum in bf16 stops growing at 256 of them."""
    norms = torch._foreach_norm([torch.full((4096,), 0.5, dtype=torch.bfloat16)], 2, torch.float32)
    assert_close(norms[0], torch.tensor(32.0))
