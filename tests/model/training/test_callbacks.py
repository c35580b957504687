"""What a run measures and shows, and when it ends early."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.model.training.tiny_fits import CPU, B, Before, T, fit, new_model, new_module
from tril.model.training.callbacks.metrics import Metrics, save_windows


def test_mfu_is_the_median_speed_against_the_peak_of_all_devices(tmp_path):
    metrics, unknown = Metrics(SimpleNamespace(peak_flops=3e12 / 4), tmp_path), Metrics(CPU, tmp_path)
    model = SimpleNamespace(flops_per_token=lambda masked: 6e6 if masked else 0)
    for each in (metrics, unknown):
        each.on_fit_start(SimpleNamespace(world_size=4), SimpleNamespace(model=model))
        each.train = [{"tokens_per_second": speed} for speed in (1e3, 2e5, 3e5)]
    assert metrics.tokens_per_second() == 2e5 and unknown.mfu() is None
    assert metrics.mfu() == pytest.approx(2e5 * 6e6 / 3e12)


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
