"""The speed of training: the module in a bare loop, and what Lightning, callbacks and logger add to it."""

import contextlib
import gc
import itertools
import os
import statistics
import warnings
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from omegaconf import OmegaConf

from tril.data.batches import TrainWindows
from tril.model.training import attention_kernels as kernels
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import mfu
from tril.model.training.module import TrainingModule
from tril.model.training.summary import peak_memory_bytes
from tril.scripts.benchmarks import timing, versus
from tril.scripts.benchmarks.bare_loop import BareLoop, new_module, new_windows
from tril.scripts.benchmarks.bench_plot import Plot, by_number
from tril.scripts.benchmarks.memory import reset_peak_memory
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.common.build_trainer import build_trainer
from tril.scripts.common.cli import user_errors


def train(bench: Bench) -> Iterator[Section]:
    """The bare loop; with `vs`, also our train.py and the other program."""
    config, module, windows = bench.run_config, new_module(bench), new_windows(bench)
    with training_conditions(bench):
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        reset_peak_memory()
        task = partial(bare_seconds, bench, module, windows)
        times = timing.interleaved({"bare": task}, bench.config.repeats, "train")["bare"]
        memory = peak_memory_bytes(bench.device)
    p50, p90 = np.quantile(list(itertools.chain(*times)), (0.5, 0.9)).tolist()
    speed = config.tokens_per_step() / p50
    row: dict[str, object] = {
        "parameters": module.model.n_parameters(),
        "tokens per step": config.tokens_per_step(),
        "ms per step (p50)": 1000 * p50,
        "ms per step (p90)": 1000 * p90,
        "tokens/s": speed,
    }
    if bench.hardware.peak_flops is not None:
        row["MFU (%)"] = 100 * mfu(speed, module.model.flops_per_token(), bench.hardware.peak_flops)
    row["peak memory (GB)"] = memory / 1e9
    notes = [
        f"{bench.config.repeats} x {bench.config.steps} steps of the module in a bare loop (batch, forward, backward, "
        f"clipping, optimizer, schedule), each after {bench.config.warmup} warm-up steps; random tokens; tokens/s from "
        "the median step.",
        f"Peak memory: {'tensors' if bench.device == 'cuda' else 'the whole process, with Python and the libraries'}.",
    ]
    samples = {f"seconds per step, repetition {i}": values for i, values in enumerate(times, 1)}
    plot = Plot(by_number(samples, 1000), "step after warm-up", "ms")
    yield Section("train", "Training: the module alone", [row], samples, notes, plot)
    if bench.config.vs is not None:
        yield versus.training(bench)


def outside(bench: Bench) -> list[Section]:
    """The share of a step that Lightning, callbacks and logger take."""
    module, windows = new_module(bench), new_windows(bench)
    loops = {"bare": bare_seconds, "train.py": lightning_seconds}
    tasks = {name: partial(loop, bench, module, windows) for name, loop in loops.items()}
    with training_conditions(bench):
        steps = timing.interleaved(tasks, bench.config.repeats, "outside")
    times = {name: [statistics.mean(seconds) for seconds in repetitions] for name, repetitions in steps.items()}
    kept = timing.paired_ratio(times["bare"], times["train.py"])
    shares = {"median": 1 - kept["median"], "smallest": 1 - kept["largest"], "largest": 1 - kept["smallest"]}
    rows = []
    for name, values in times.items():
        step = statistics.median(values)
        row = {"loop": name, "ms per step (median)": 1000 * step, "tokens/s": bench.run_config.tokens_per_step() / step}
        empty = name == "bare"
        rows.append(row | {f"outside the module (%), {key}": None if empty else 100 * x for key, x in shares.items()})
    notes = [
        f"{bench.config.repeats} pairs of {bench.config.steps} steps in alternating order, each after "
        f"{bench.config.warmup} warm-up steps: the same module, data and optimizer in the bare loop, and in "
        "lightning.Trainer with the callbacks and the logger of train.py; the mean step of each.",
        "The share is 1 - bare / train.py of each pair. Validation and checkpoints are not included.",
    ]
    plot = Plot(by_number(times, 1000), "pair", "ms per step")
    return [Section("outside", "Outside the module: Lightning, callbacks, logger", rows, times, notes, plot)]


def bare_seconds(bench: Bench, module: TrainingModule, windows: TrainWindows) -> list[float]:
    """The time of each step in the bare loop."""
    step = BareLoop(module, windows, bench).step
    return timing.step_seconds(step, warmup=bench.config.warmup, steps=bench.config.steps, device=bench.device)


@contextlib.contextmanager
def training_conditions(bench: Bench) -> Iterator[None]:
    """What train.py sets around its steps: the fastest attention kernel of the device, and no garbage collection."""
    config = bench.run_config
    times = kernels.measure(config.model, config.data.batch_size, bench.hardware, documents=config.data.document_mask)
    gc.collect()
    gc.disable()
    try:
        with kernels.prefer(times):
            yield
    finally:
        gc.enable()


class StepMarks(Callback):
    """Marks the start of training and the end of every optimizer step."""

    def __init__(self, device: str):
        self.timer, self._step = timing.StepTimer(device), 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.timer.mark()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.timer.mark()


def lightning_seconds(bench: Bench, module: TrainingModule, windows: TrainWindows) -> list[float]:
    """The time of each step in the Trainer that train.py builds, without validation and checkpoints."""
    trainer_settings = {
        "devices": 1,
        "max_steps": bench.config.warmup + bench.config.steps,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "check_val_every_n_epoch": None,  # no checkpoint at the end either
    }
    # Without the callbacks that run only before the first step, or that need a tokenizer.
    callbacks = {name: cfg for name, cfg in bench.cfg["callbacks"].items() if name not in ("causality", "samples")}
    cfg = OmegaConf.create(bench.cfg | {"callbacks": callbacks, "trainer": bench.cfg["trainer"] | trainer_settings})
    metrics = Metrics(bench.run_config.tokens_per_step(), bench.hardware.peak_flops)
    with user_errors():
        trainer = build_trainer(cfg, bench.run_config, metrics)
    marks = StepMarks(bench.device)
    trainer.callbacks.append(marks)  # pyright: ignore[reportAttributeAccessIssue] Lightning sets it at run time
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # the lines of callbacks.progress
        trainer.fit(module, windows)
    return marks.timer.seconds()[bench.config.warmup :]
