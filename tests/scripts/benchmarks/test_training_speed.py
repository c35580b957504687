"""what=train and what=outside: the bare loop computes what Lightning computes, and the figures follow from the times."""

import copy
import csv
from dataclasses import replace

import pytest
import torch
from lightning import Trainer

from tests.scripts.benchmarks.test_bench import composed
from tril.data.batches import TrainWindows
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import timing
from tril.scripts.benchmarks import training_speed as training
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import UserError, plain

TINY = ["model.n_layers=1", "model.dim=32", "model.n_heads=2", "model.context_length=16", "data.batch_size=2"]
CPU = ["trainer.accelerator=cpu", "trainer.precision=32-true", "data.tokenizer.vocab_size=300"]


@pytest.fixture
def bench(tmp_path):
    def bench(*overrides, repeats=1, warmup=1, steps=2):
        cfg = composed(*TINY, *CPU, *overrides, f"output_dir={tmp_path}")
        return Bench(plan_of(cfg), plain(cfg), repeats, warmup, steps, [], tmp_path)

    return bench


@pytest.mark.parametrize(
    "choices",
    [
        *(
            [f"optim={optim}", f"trainer.precision={precision}"]
            for optim in ("muon", "adamw")
            for precision in ("32-true", "bf16-mixed", "bf16-true")
        ),
        ["+trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=0.0001"],
    ],
    ids=" ".join,
)
def test_the_bare_loop_ends_with_the_very_weights_of_lightning(bench, choices):
    """Same windows, accumulation, clipping that bites and a moving learning rate."""
    options = ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.01", "optim.schedule.warmup_steps=3")
    bench = bench(*options, *choices, warmup=1, steps=4)
    bare = training.new_module(bench)
    fitted = copy.deepcopy(bare)
    fitted.nll = fitted.model.nll  # bound to the copied model
    loop = training.BareLoop(bare, training.new_windows(bench), bench)
    for _ in range(5):
        loop.step()
    assert len(training.lightning_seconds(bench, fitted, training.new_windows(bench))) == 4  # without the warm-up
    assert len(loop.optimizer.state) > 0
    for (name, ours), (_, theirs) in zip(bare.named_parameters(), fitted.named_parameters()):
        assert torch.equal(ours, theirs), name


def test_outside_runs_the_callbacks_and_the_logger_of_train_py_and_keeps_the_rest_out(bench, monkeypatch, tmp_path):
    bench = bench("trainer.log_every_n_steps=1", repeats=2, warmup=1, steps=3)
    trainers = []
    fit = Trainer.fit
    monkeypatch.setattr(
        Trainer, "fit", lambda trainer, *arguments: trainers.append(trainer) or fit(trainer, *arguments)
    )
    (section,) = training.outside(bench)
    names = [{type(callback).__name__ for callback in trainer.callbacks} for trainer in trainers]
    assert len(names) == 2 and all(
        {"Metrics", "Progress", "WindowLosses", "HeadMetrics", "Checkpoint"} <= n for n in names
    )
    files = sorted(tmp_path.glob("csv/version_*/metrics.csv"))
    assert [[int(row["step"]) for row in csv.DictReader(file.open())] for file in files] == [[1, 2, 3, 4]] * 2
    assert not list(tmp_path.rglob("*.ckpt")) and not (tmp_path / "samples.txt").exists()
    bare, lightning = section.rows
    assert set(section.samples) == {"bare", "train.py's"} and all(
        len(values) == 2 for values in section.samples.values()
    )
    kept, smallest, largest = timing.paired_ratio(section.samples["bare"], section.samples["train.py's"])
    assert lightning["outside the module (%), median"] == pytest.approx(100 * (1 - kept))
    assert lightning["outside the module (%), smallest"] == pytest.approx(100 * (1 - largest))
    assert lightning["outside the module (%), largest"] == pytest.approx(100 * (1 - smallest))
    assert bare["outside the module (%), median"] is None


def test_the_share_outside_from_literal_times(bench, monkeypatch):
    bare, lightning = (
        iter([[0.006, 0.010], [0.009, 0.009], [0.010]]),
        iter([[0.010], [0.010], [0.001, 0.039]]),
    )  # their means count
    monkeypatch.setattr(training, "bare_seconds", lambda *arguments: next(bare))
    monkeypatch.setattr(training, "lightning_seconds", lambda *arguments: next(lightning))
    (section,) = training.outside(bench(repeats=3))
    shares = {key.rpartition(" ")[2]: value for key, value in section.rows[1].items() if key.startswith("outside")}
    assert shares == pytest.approx({"median": 20, "smallest": 10, "largest": 50})
    assert [row["ms per step (median)"] for row in section.rows] == pytest.approx([9, 10])
    assert [row["tokens/s"] for row in section.rows] == pytest.approx([32 / 0.009, 32 / 0.010])


def test_figures_of_training_from_literal_times(bench, monkeypatch):
    laps = iter([[0.001, 0.002, 0.003], [0.004, 0.005, 0.006]])
    monkeypatch.setattr(timing, "step_seconds", lambda step, **options: next(laps))
    monkeypatch.setattr(training, "peak_memory_bytes", lambda device: 3_000_000_000)
    bench = bench("model.tie_embeddings=false", "model.bias=false", "data.document_mask=true", repeats=2, steps=3)
    bench = replace(bench, plan=replace(bench.plan, hardware=replace(bench.plan.hardware, peak_flops=1e12)))
    (section,) = training.train(bench)
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


def test_without_a_known_peak_there_is_no_mfu(bench):
    (section,) = training.train(bench(repeats=2, warmup=1, steps=3))
    assert "MFU (%)" not in section.rows[0]
    assert [len(lap) for lap in section.samples.values()] == [3, 3]


def test_windows_are_those_of_training_and_use_the_whole_vocabulary(bench):
    bench = bench("data.tokenizer.kind=byte", "trainer.accumulate_grad_batches=3", warmup=5, steps=20)
    windows = training.new_windows(bench)
    assert type(windows) is TrainWindows and windows.tokens.dtype == "uint16"
    assert len(windows) == 25 * 3  # one epoch is as long as a repetition
    assert windows.tokens.max() == 256 and windows.tokens.min() == 0
    assert all(part.shape == (2, 16) for part in next(iter(windows)))


def test_an_unknown_way_to_clip_is_refused_in_one_line(bench):
    bench = bench("+trainer.gradient_clip_algorithm=hard")
    with pytest.raises(UserError, match="^trainer.gradient_clip_algorithm=hard must be norm or value$"):
        training.BareLoop(training.new_module(bench), training.new_windows(bench), bench)
