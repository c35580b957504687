"""The speed of training: the module in a bare loop, and what Lightning, callbacks and logger add to it."""

import contextlib
import gc
import itertools
import os
import statistics
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.nn.utils import clip_grad_norm_

from tril.data.batches import TrainWindows, on_device
from tril.data.prepare import MAX_UINT16_VOCAB
from tril.model.autocast import AUTOCAST
from tril.model.gpt import GPT
from tril.model.training.hardware import mfu
from tril.model.training.module import TrainingModule
from tril.model.training.summary import peak_memory_bytes
from tril.scripts.benchmarks import timing, versus
from tril.scripts.benchmarks.machine import reset_peak_memory
from tril.scripts.benchmarks.section import Bench, Plot, Section, by_number
from tril.scripts.cli.errors import user_errors
from tril.scripts.cli.process import StopRequest
from tril.scripts.cli.run import new_trainer


def train(bench: Bench) -> Iterator[Section]:
    """The bare loop; with `vs`, also our train.py and the other program."""
    module, windows, peak_flops = new_module(bench), new_windows(bench), bench.hardware.peak_flops
    with training_conditions():
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        reset_peak_memory()
        task = partial(bare_seconds, bench, module, windows)
        times = timing.interleaved({"bare": task}, bench.config.repeats, "train")["bare"]
        memory = peak_memory_bytes(bench.device)
    p50, p90 = np.quantile(np.concatenate(times), (0.5, 0.9)).tolist()
    tokens = bench.run_config.tokens_per_step()
    row = {
        "parameters": module.model.n_parameters(),
        "tokens per step": tokens,
        "ms per step (p50)": 1000 * p50,
        "ms per step (p90)": 1000 * p90,
        "tokens/s": tokens / p50,
    }
    if peak_flops is not None:
        row["MFU (%)"] = 100 * mfu(tokens / p50, module.model.flops_per_token(masked=True), peak_flops)
    row["peak memory (GB)"] = memory / 1e9
    notes = [
        f"{bench.config.repeats} x {bench.config.steps} steps in a bare loop (batch, forward, backward, clipping, "
        f"optimizer, schedule), each after {bench.config.warmup} of warm-up; random tokens; tokens/s: the median step.",
        f"Peak memory: {'tensors' if bench.device == 'cuda' else 'the whole process, with Python and the libraries'}.",
    ]
    samples = {f"seconds per step, repetition {i}": values for i, values in enumerate(times, 1)}
    plot = Plot(by_number(samples, 1000), "step after warm-up", "ms")
    yield Section("train", "Training: the module alone", [row], samples, notes, plot)
    if bench.config.vs is not None:
        yield versus.training(bench)


def outside(bench: Bench) -> list[Section]:
    """The share of a step that Lightning, callbacks and logger take."""
    module, windows, tokens = new_module(bench), new_windows(bench), bench.run_config.tokens_per_step()
    loops = {"bare": bare_seconds, "train.py": lightning_seconds}
    tasks = {name: partial(loop, bench, module, windows) for name, loop in loops.items()}
    with training_conditions():
        steps = timing.interleaved(tasks, bench.config.repeats, "outside")
    times = {name: [statistics.mean(seconds) for seconds in repetitions] for name, repetitions in steps.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    pairs = zip(times["bare"], times["train.py"], strict=True)
    shares = timing.spread([100 * (1 - bare / whole) for bare, whole in pairs], "outside the module (%), {}")
    rows = [
        {"loop": name, "ms per step (median)": 1000 * step, "tokens/s": tokens / step}
        | (dict.fromkeys(shares) if name == "bare" else shares)
        for name, step in medians.items()
    ]
    notes = [
        f"{bench.config.repeats} pairs of {bench.config.steps} steps, each after {bench.config.warmup} of warm-up: the "
        "bare loop, and lightning.Trainer with the callbacks and the logger of train.py; the mean step of each.",
        "The share is 1 - bare / train.py of each pair. Validation and checkpoints are not included.",
    ]
    plot = Plot(by_number(times, 1000), "pair", "ms per step")
    return [Section("outside", "Outside the module: Lightning, callbacks, logger", rows, times, notes, plot)]


def bare_seconds(bench: Bench, module: TrainingModule, windows: TrainWindows) -> list[float]:
    """The time of each step in the bare loop."""
    step = BareLoop(module, windows, bench).step
    return timing.step_seconds(step, bench.device, warmup=bench.config.warmup, steps=bench.config.steps)


@contextlib.contextmanager
def training_conditions() -> Iterator[None]:
    """What train.py sets around its steps: no garbage collection."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lightning_seconds(bench: Bench, module: TrainingModule, windows: TrainWindows) -> list[float]:
    """The time of each step in the Trainer that train.py builds, without validation and checkpoints."""
    config, steps = bench.run_config, bench.config.warmup + bench.config.steps
    # Without the callbacks that run only before the first step, or that need a tokenizer, and without validation.
    callbacks = replace(config.callbacks, causality=None, samples=None)
    trainer = replace(config.trainer, devices=1, max_steps=steps, val_check_interval=steps + 1)
    with user_errors():
        trainer = new_trainer(replace(config, callbacks=callbacks, trainer=trainer), bench.folder, StopRequest())
    timer = timing.StepTimer(bench.device)

    def mark_step(trainer, module, outputs, batch, batch_idx: int) -> None:
        if (batch_idx + 1) % bench.run_config.accumulate == 0:  # an optimizer step ends
            timer.mark()

    marks = LambdaCallback(on_train_start=lambda *_: timer.mark(), on_train_batch_end=mark_step)
    trainer.callbacks.append(marks)  # pyright: ignore[reportAttributeAccessIssue] Lightning sets it at run time
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`")
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")
    with open(os.devnull, "w") as devnull, contextlib.redirect_stdout(devnull):  # the lines of callbacks.progress
        trainer.fit(module, windows)
    return timer.seconds()[bench.config.warmup :]


def new_module(bench: Bench) -> TrainingModule:
    """The module of train.py with fresh weights."""
    torch.manual_seed(bench.run_config.top.seed)
    config = bench.run_config
    return TrainingModule(
        GPT(config.model),
        config.optim,
        total_steps=max(config.steps, bench.config.warmup + bench.config.steps),
        val_bytes={},  # unused: there is no validation
        payload={},
        compile=bench.hardware.compile,
        document_eot=0 if config.data.document_mask else None,
    )


def new_windows(bench: Bench) -> TrainWindows:
    """The windows of train.py over random ids, one epoch as long as a repetition; on CUDA in the GPU's memory."""
    config, seed = bench.run_config, bench.run_config.top.seed
    size = config.tokens_per_step() * (bench.config.warmup + bench.config.steps) + 1
    dtype = np.uint16 if config.model.vocab_size <= MAX_UINT16_VOCAB else np.uint32  # as in a prepared file
    tokens = np.random.default_rng(seed).integers(config.model.vocab_size, size=size, dtype=np.uint32).astype(dtype)
    if bench.device == "cuda":
        tokens = on_device(tokens, "cuda")
    return TrainWindows(tokens, config.model.context_length, config.data.batch_size, seed)


class BareLoop:
    """Runs optimizer steps of the module with a new optimizer: batch, forward, backward, clipping, update, schedule."""

    def __init__(self, module: TrainingModule, windows: TrainWindows, bench: Bench):
        self.device, self.precision = bench.device, bench.hardware.precision
        self.module = module.to(self.device).train()
        if self.precision == "bf16-true":
            module.to(torch.bfloat16)
        configured = module.configure_optimizers(self.precision)
        self.optimizer, self.schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "16-mixed")
        trainer = bench.run_config.trainer
        self.clip = trainer.gradient_clip_val
        self.accumulate = bench.run_config.accumulate
        self.batches = itertools.chain.from_iterable(itertools.repeat(windows))

    def step(self) -> None:
        dtype = AUTOCAST.get(self.precision)
        for _ in range(self.accumulate):
            inputs, targets = (ids.to(self.device, non_blocking=True) for ids in next(self.batches))
            with torch.autocast(self.device, dtype, enabled=dtype is not None, cache_enabled=False):
                loss = self.module.training_step((inputs, targets), 0)
            self.scaler.scale(loss / self.accumulate).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.parameters, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
