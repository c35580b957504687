"""Throughput counts training only, and the other callbacks of a run."""

import gc
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.model.training.tiny_fits import B, Before, T, fit, new_model, new_module
from tril.model.training.callbacks import progress as progress_module
from tril.model.training.callbacks.metrics import Metrics, Stopwatch
from tril.model.training.callbacks.progress import Progress
from tril.model.training.callbacks.window_losses import WindowLosses
from tril.model.training.gc_pause import gc_paused


def test_stopwatch_counts_only_while_it_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.start()
    now[0] = 2.0
    watch.stop()
    now[0] = 50.0  # a validation
    watch.stop()
    watch.start()
    watch.start()
    now[0] = 53.0
    assert watch.seconds() == 5.0
    now[0] = 54.5
    assert watch.seconds() == 6.5
    assert Stopwatch(7.0).seconds() == 7.0


def test_mfu_is_the_median_speed_against_the_peak_of_all_devices():
    metrics, unknown = Metrics(3e12 / 4), Metrics(None)
    model = SimpleNamespace(flops_per_token=lambda masked: 6e6 if masked else 0)
    for each in (metrics, unknown):
        each.on_fit_start(SimpleNamespace(world_size=4), SimpleNamespace(model=model))
    metrics.train = [
        {"step": step, "loss": 1.0, "tokens_per_second": speed} for step, speed in ((1, 1e3), (2, 2e5), (3, 3e5))
    ]
    assert metrics.tokens_per_second() == 2e5
    assert metrics.mfu() == 2e5 * 6e6 / 3e12
    assert unknown.mfu(2e5) is None


def test_tokens_are_counted_over_a_change_of_the_size_of_a_step(tmp_path):
    """Five steps of one micro-batch; then the sixth, and two of two."""
    path = tmp_path / "middle.ckpt"
    save = Before(6, lambda module: module.trainer.save_checkpoint(path))
    fit(new_module(new_model()), save)
    trainer = fit(new_module(new_model()), checkpoint=path, done=5, accumulate_grad_batches=2)
    assert Metrics.of(trainer).tokens == B * T * (5 + 1 + 2 * 2)


def test_seconds_and_curves_survive_a_checkpoint(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics, resumed = Metrics(None, started=-2.0), Metrics(None, started=89.0)
    metrics.train.append({"step": 10, "loss": 2.0, "tokens_per_second": 5.0})
    metrics.tokens = 700
    metrics._clock.start()
    now[0] = 3.0
    metrics._clock.stop()
    now[0] = 90.0  # a validation, at whose end the checkpoint is written
    resumed.load_state_dict(metrics.state_dict())
    resumed._clock.start()
    now[0] = 92.0
    assert resumed.train == metrics.train
    assert resumed.spent() == {"train/tokens": 700.0, "train/seconds": 5.0}
    assert resumed.wall_seconds() == 92 + 3


def test_window_losses_of_the_last_and_of_the_best_validation(tmp_path):
    metrics, keep = Metrics(None), WindowLosses(tmp_path)
    for step, loss in ((10, 2.0), (20, 1.0), (30, 1.5)):
        metrics.val.append({"step": step, "loss": loss, "bpb": loss})
        trainer = SimpleNamespace(is_global_zero=True, callbacks=[metrics], global_step=step)
        module = SimpleNamespace(
            val_windows=torch.tensor([[loss * 4, loss * 2], [4, 2]], dtype=torch.float64),
            val_nll=torch.tensor([1.0, 2, 3, 4, 5, 6]) * loss,
            val_documents=lambda n: np.array([0, 0, 0, 1, 1, 3])[:n],  # document 2 has no token
            val_targets=[6],
            model=SimpleNamespace(config=SimpleNamespace(context_length=4)),
        )
        keep.on_validation_end(trainer, module)
    last, best = (dict(np.load(tmp_path / f"windows_{name}.npz")) for name in ("last", "best"))
    assert (last["step"], best["step"], last["context_length"]) == (30, 20, 4)
    assert last["nll"].tolist() == [6.0, 3.0] and best["nll"].tolist() == [4.0, 2.0]
    assert last["targets"].tolist() == [4, 2] and last["targets"].dtype == int
    assert last["document_nll"].tolist() == [9.0, 13.5, 0, 9.0] and last["document_targets"].tolist() == [3, 2, 0, 1]
    assert best["document_nll"].tolist() == [6.0, 9, 0, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["windows_best.npz", "windows_last.npz"]


def test_the_collector_is_paused_in_a_block_and_as_before_afterwards():
    for enabled in (True, False):
        gc.enable() if enabled else gc.disable()
        try:
            with pytest.raises(KeyError), gc_paused():
                assert not gc.isenabled() and gc.get_freeze_count() > 0
                raise KeyError
            assert gc.isenabled() == enabled and gc.get_freeze_count() == 0
        finally:
            gc.enable()


@pytest.mark.parametrize("mode", [None, "default"])
def test_compilation_time_is_printed_once_after_the_first_step(monkeypatch, capsys, mode):
    monkeypatch.setattr(progress_module, "compile_seconds", lambda: 41.3)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere/compiled")
    progress, metrics = Progress(20), Metrics(None)
    trainer = SimpleNamespace(is_global_zero=True, callbacks=[metrics], global_step=0, max_steps=5)
    progress.on_train_start(trainer, SimpleNamespace(losses=SimpleNamespace(compile=mode)))
    assert "compiled" not in capsys.readouterr().out
    for _ in range(2):
        progress.on_train_batch_end(trainer, None, None, None, 0)
    printed = capsys.readouterr().out
    assert printed == ("compiled in 41 s (cached in somewhere/compiled: the next start is faster)\n" if mode else "")


def test_a_redirected_validation_is_one_line(capsys):
    progress, metrics = Progress(20), Metrics(None)
    metrics.val.append({"step": 7, "loss": 2.0, "bpb": 1.0, "windows": {"scored": 8, "of": 31}})
    counts = {"sanity_checking": False, "num_val_batches": [3, 1]}
    trainer = SimpleNamespace(is_global_zero=True, callbacks=[metrics], **counts)
    progress.on_validation_start(trainer, None)
    progress.on_validation_batch_end(trainer, None, None, None, 0)
    progress.on_validation_end(trainer, None)
    line = "step      7  validation: 2.0000 nats per token, 1.0000 bits per byte (8 of 31 windows)\n"
    assert capsys.readouterr() == (line, "")
