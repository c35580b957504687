"""Gradient norms against float64 sums, and no step with numbers that are not finite."""

import math

import pytest
import torch
from lightning import Callback

from tests.conftest import assert_close
from tests.model.training.tiny_fits import STEPS, batches, damaged_losses, fit, new_model, new_module
from tril.model.training.callbacks.metrics import Metrics, norms_of
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
def test_norms_are_those_of_the_gradient_before_clipping(accumulate, monkeypatch):
    written, weights = [], Weights()
    monkeypatch.setattr(Metrics, "write", staticmethod(lambda trainer, row: written.append((trainer.global_step, row))))
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1e-3, "limit_val_batches": 0}
    trainer = fit(new_module(new_model()), weights, log_every_n_steps=3, **options)
    rows = Metrics.of(trainer).train
    assert [row["step"] for row in rows] == [step for step, _ in written] == [3, 6, 8], "every third, and the last"
    data = batches(STEPS * accumulate)
    for row, (step, logged) in zip(rows, written, strict=True):
        expected = exact_norms(weights.before[step - 1], data[(step - 1) * accumulate : step * accumulate])
        assert row["grad_norm"] == pytest.approx(expected, rel=1e-5)
        assert {name: logged[f"grad_norm/{name}"] for name in expected} == row["grad_norm"]


def test_frozen_and_unused_parameters_have_no_gradient():
    model = new_model(pos="learned")
    model.embed.requires_grad_(False)
    assert Metrics.of(fit(new_module(model))).train[-1]["grad_norm"]["total"] > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_made(value):
    module, weights = damaged_losses(new_module(new_model()), {5: value}), Weights()
    with pytest.raises(NonFiniteError, match="step 6 is not finite: .* the weights stay those of step 5") as error:
        fit(module, weights)
    assert error.value.step == 5
    assert all(torch.equal(value, weights.before[5][name]) for name, value in module.model.state_dict().items())


def test_norms_of_bf16_gradients_are_summed_in_float32():
    """4,096 equal elements: a running sum in bf16 stops growing at 256 of them."""
    (norm,) = norms_of((torch.full((4096,), 0.5, dtype=torch.bfloat16),))
    assert_close(norm, torch.tensor(32.0))
