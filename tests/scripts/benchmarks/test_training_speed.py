"""what=train and what=outside: the bare loop computes what Lightning computes; figures from literal times."""

import copy
import csv
from dataclasses import replace

import pytest
import torch
from lightning import Trainer

from tril.data.batches import TrainWindows
from tril.model.training.module import Loss
from tril.scripts.benchmarks import timing, training_speed
from tril.scripts.benchmarks.starting import STEP_LINE
from tril.scripts.benchmarks.training_speed import BareLoop, new_module, new_windows

OUTSIDE = "outside the module (%), "


def case(optim, precision, *marks):
    return pytest.param([f"optim={optim}", f"trainer.precision={precision}"], marks=marks, id=f"{optim} {precision}")


@pytest.mark.parametrize(
    "choices",
    [
        case("muon", "bf16-mixed"),
        case("adamw", "32-true"),
        case("adamw", "bf16-true"),
        case("muon", "32-true", pytest.mark.slow),
        case("muon", "bf16-true", pytest.mark.slow),
        case("adamw", "bf16-mixed", pytest.mark.slow),
    ],
)
def test_the_bare_loop_ends_with_the_weights_of_lightning_to_the_bit(make_bench, choices):
    """Same windows, accumulation, effective clipping and a changing learning rate."""
    options = ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.01", "optim.schedule.warmup_steps=3")
    bench = make_bench(*options, *choices, "steps=4")
    bare = new_module(bench)
    fitted = copy.deepcopy(bare)
    fitted.losses = Loss(fitted.model)
    loop = BareLoop(bare, new_windows(bench), bench)
    for _ in range(5):
        loop.step()
    assert len(training_speed.lightning_seconds(bench, fitted, new_windows(bench))) == 4  # without the warm-up
    assert len(loop.optimizer.state) > 0
    for (name, actual), (_, expected) in zip(bare.named_parameters(), fitted.named_parameters(), strict=True):
        assert torch.equal(actual, expected), name


def test_outside_runs_the_callbacks_and_the_logger_of_train_py(make_bench, monkeypatch, tmp_path):
    bench = make_bench("trainer.log_every_n_steps=1", "repeats=2", "steps=3")
    monkeypatch.setattr(training_speed.os, "devnull", tmp_path / "stdout.txt")
    trainers = []
    fit = Trainer.fit
    monkeypatch.setattr(
        Trainer, "fit", lambda trainer, *arguments: trainers.append(trainer) or fit(trainer, *arguments)
    )
    (section,) = training_speed.outside(bench)
    names = [{type(callback).__name__ for callback in trainer.callbacks} for trainer in trainers]
    assert len(names) == 2 and all({"Metrics", "Progress", "HeadMetrics", "Checkpoints"} <= n for n in names)
    files = sorted(tmp_path.glob("csv/version_*/metrics.csv"))
    steps = [[int(row["step"]) for row in csv.DictReader(file.open()) if row["train/loss"]] for file in files]
    assert steps == [[1, 2, 3, 4]]  # a new run in the folder begins the file again
    assert not list(tmp_path.rglob("*.ckpt")) and not (tmp_path / "samples.txt").exists()
    assert (tmp_path / "stdout.txt").read_bytes().startswith(STEP_LINE)  # what=start waits for it
    bare, lightning = section.rows
    assert set(section.samples) == {"bare", "train.py"} and all(len(values) == 2 for values in section.samples.values())
    kept = timing.paired_ratio(section.samples["bare"], section.samples["train.py"])
    assert lightning[f"{OUTSIDE}median"] == pytest.approx(100 * (1 - kept["median"]))
    assert lightning[f"{OUTSIDE}smallest"] == pytest.approx(100 * (1 - kept["largest"]))
    assert lightning[f"{OUTSIDE}largest"] == pytest.approx(100 * (1 - kept["smallest"]))
    assert bare[f"{OUTSIDE}median"] is None


def test_the_share_outside_from_literal_times(make_bench, monkeypatch):
    bare = iter([[0.006, 0.010], [0.009, 0.009], [0.010]])  # the means count
    lightning = iter([[0.010], [0.010], [0.001, 0.039]])
    monkeypatch.setattr(training_speed, "bare_seconds", lambda *arguments: next(bare))
    monkeypatch.setattr(training_speed, "lightning_seconds", lambda *arguments: next(lightning))
    (section,) = training_speed.outside(make_bench("repeats=3"))
    shares = {key: section.rows[1][f"{OUTSIDE}{key}"] for key in ("median", "smallest", "largest")}
    assert shares == pytest.approx({"median": 20, "smallest": 10, "largest": 50})
    assert [row["ms per step (median)"] for row in section.rows] == pytest.approx([9, 10])
    assert [row["tokens/s"] for row in section.rows] == pytest.approx([32 / 0.009, 32 / 0.010])


def test_rows_of_training_from_literal_times(make_bench, monkeypatch):
    laps = iter([[0.001, 0.002, 0.003], [0.004, 0.005, 0.006]])
    monkeypatch.setattr(timing, "step_seconds", lambda step, device, **options: next(laps))
    monkeypatch.setattr(training_speed, "peak_memory_bytes", lambda device: 3_000_000_000)
    choices = ("model.tie_embeddings=false", "model.bias=false", "data.document_mask=true")
    bench = make_bench(*choices, "repeats=2", "steps=3")
    hardware = replace(bench.hardware, peak_flops=1e12)
    bench = replace(bench, run_config=replace(bench.run_config, hardware=hardware))
    (section,) = training_speed.train(bench)
    (row,) = section.rows
    assert row["ms per step (p50)"] == pytest.approx(3.5) and row["ms per step (p90)"] == pytest.approx(5.5)
    assert row["tokens per step"] == 32 and row["tokens/s"] == pytest.approx(32 / 0.0035)
    # relu2 with ratio 4, 4 projections of attention, and the head; the gains of the norms are multiplied as well
    gains = row["parameters"] - (12 * 32**2 + 2 * 300 * 32)
    n = 12 * 32**2 + 300 * 32 + gains
    assert 0 <= gains <= 6 * 32
    assert row["MFU (%)"] == pytest.approx(100 * (32 / 0.0035) * (6 * n + 12 * 1 * 32 * 16) / 1e12)
    assert row["peak memory (GB)"] == 3
    assert list(section.samples.values()) == [[0.001, 0.002, 0.003], [0.004, 0.005, 0.006]]


def test_without_a_known_peak_there_is_no_mfu(make_bench):
    (section,) = training_speed.train(make_bench("repeats=2", "steps=3"))
    assert "MFU (%)" not in section.rows[0]
    assert [len(lap) for lap in section.samples.values()] == [3, 3]


def test_windows_have_the_type_of_train_py_and_the_whole_vocabulary(make_bench):
    bench = make_bench("data.tokenizer.kind=byte", "trainer.accumulate_grad_batches=3", "warmup=5", "steps=20")
    windows = new_windows(bench)
    [tokens] = windows.texts
    assert type(windows) is TrainWindows and tokens.dtype is torch.int16  # a view of uint16
    assert len(windows) == 25 * 3  # one epoch is as long as a repetition
    assert tokens.max() == 256 and tokens.min() == 0
    assert all(part.shape == (2, 16) for part in next(iter(windows)))
