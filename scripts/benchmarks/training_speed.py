"""The speed of training: the module alone in a bare loop, and what Lightning, callbacks and logger add to it."""

import contextlib
import gc
import itertools
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from hydra.utils import instantiate
from lightning import Callback, LightningModule, Trainer
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tril.data.batches import TrainWindows, on_device
from tril.model.gpt import GPT
from tril.model.training import attention_kernels as kernels
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import mfu
from tril.model.training.module import TrainingModule
from tril.model.training.run_estimate import AUTOCAST
from tril.model.training.summary import peak_memory_bytes
from tril.scripts.benchmarks import timing, versus
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.common.cli import UserError

CLIP = {
    None: clip_grad_norm_,
    "norm": clip_grad_norm_,
    "value": clip_grad_value_,
}  # by Lightning's names for gradient_clip_algorithm


def train(bench: Bench) -> Iterator[Section]:
    """The bare loop; with `vs`, our train.py and the other program as well."""
    module, windows = new_module(bench), new_windows(bench)
    with as_in_training(bench):
        timing.reset_peak_memory(bench.device)
        laps = timing.interleaved({"bare": partial(bare_seconds, bench, module, windows)}, bench.repeats, "train")[
            "bare"
        ]
        memory = peak_memory_bytes(bench.device)
    times = timing.summary([second for lap in laps for second in lap])
    speed = bench.plan.tokens_per_step() / times["median"]
    row = {
        "parameters": module.model.n_parameters(),
        "tokens per step": bench.plan.tokens_per_step(),
        "ms per step (p50)": 1000 * times["median"],
        "ms per step (p90)": 1000 * times["p90"],
        "tokens/s": speed,
    }
    if bench.plan.hardware.peak_flops is not None:
        row["MFU (%)"] = 100 * mfu(speed, module.model.flops_per_token(), bench.plan.hardware.peak_flops)
    row["peak memory (GB)"] = memory / 1e9
    notes = [
        f"{bench.repeats} x {bench.steps} steps of the module in a bare loop (batch, forward, backward, clipping, optimizer, schedule), "
        f"each after {bench.warmup} that do not count; random tokens; tokens/s from the median step.",
        f"Peak memory is {'what tensors took' if bench.device == 'cuda' else 'that of the whole process, Python and torch included'}.",
    ]
    samples = {f"seconds per step, repetition {i}": lap for i, lap in enumerate(laps, 1)}
    yield Section("train", "Training: the module alone", [row], samples, notes, partial(draw_steps, laps))
    if bench.cfg["vs"] is not None:
        yield versus.training(bench)


def outside(bench: Bench) -> list[Section]:
    """The share of a step that Lightning, callbacks and logger take."""
    module, windows = new_module(bench), new_windows(bench)
    loops = {"bare": bare_seconds, "train.py's": lightning_seconds}
    tasks = {name: partial(mean_seconds, loop, bench, module, windows) for name, loop in loops.items()}
    with as_in_training(bench):
        times = timing.interleaved(tasks, bench.repeats, "outside")
    kept, smallest, largest = timing.paired_ratio(times["bare"], times["train.py's"])
    share = {"median": 100 * (1 - kept), "smallest": 100 * (1 - largest), "largest": 100 * (1 - smallest)}
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        row = {"loop": name, "ms per step (median)": 1000 * median, "tokens/s": bench.plan.tokens_per_step() / median}
        rows.append(
            row | {f"outside the module (%), {key}": None if name == "bare" else value for key, value in share.items()}
        )
    notes = [
        f"{bench.repeats} pairs of {bench.steps} steps, in turn, each after {bench.warmup} that do not count: the same module, data and "
        "optimizer in the bare loop, and in lightning.Trainer with train.py's callbacks and logger; the mean step of each span.",
        "The share is 1 - bare / train.py's of each pair. Validation and checkpoints have no part in it.",
    ]
    return [
        Section(
            "outside",
            "Outside the module: Lightning, callbacks, logger",
            rows,
            times,
            notes,
            partial(draw_pairs, times),
        )
    ]


def new_module(bench: Bench) -> TrainingModule:
    torch.manual_seed(bench.cfg["seed"])
    plan = bench.plan
    return TrainingModule(
        GPT(plan.model),
        plan.optim,
        total_steps=max(plan.steps, bench.warmup + bench.steps),
        val_bytes_per_token=1.0,  # there is no validation here
        payload={},
        compile=plan.hardware.compile,
        document_eot=0 if plan.data.document_mask else None,
    )


def new_windows(bench: Bench) -> TrainWindows:
    """train.py's windows over random ids, one epoch of a repetition's length; on a GPU they lie in its memory, as those of train.py do."""
    plan, seed = bench.plan, bench.cfg["seed"]
    size = plan.tokens_per_step() * (bench.warmup + bench.steps) + 1
    tokens = np.random.default_rng(seed).integers(plan.model.vocab_size, size=size, dtype=np.uint32)
    if plan.model.vocab_size <= np.iinfo(np.uint16).max + 1:
        tokens = tokens.astype(np.uint16)  # as in a prepared file
    if bench.device == "cuda":
        tokens = on_device(tokens, "cuda")
    return TrainWindows(tokens, plan.model.context_length, plan.data.batch_size, seed)


class BareLoop:
    """What one optimizer step has to compute, and nothing else: the module with a new optimizer, without Lightning."""

    def __init__(self, module: TrainingModule, windows: TrainWindows, bench: Bench):
        self.device, self.precision = bench.device, bench.plan.hardware.precision
        self.module = module.to(self.device).train()
        if self.precision == "bf16-true":
            module.to(torch.bfloat16)
        made = module.configure_optimizers()
        self.optimizer, self.schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.scaler = torch.amp.GradScaler(self.device, enabled=self.precision == "16-mixed")
        algorithm = bench.cfg["trainer"].get("gradient_clip_algorithm")
        if algorithm not in CLIP:
            raise UserError(f"trainer.gradient_clip_algorithm={algorithm} must be norm or value")
        self.clip, self.clip_grad = bench.cfg["trainer"]["gradient_clip_val"], CLIP[algorithm]
        self.accumulate = bench.plan.accumulate
        self.batches = itertools.chain.from_iterable(itertools.repeat(windows))

    def step(self) -> None:
        for _ in range(self.accumulate):
            batch = [part.to(self.device, non_blocking=True) for part in next(self.batches)]
            with self.forward_context():
                loss = self.module.training_step(batch, 0)
            self.scaler.scale(loss / self.accumulate).backward()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.clip_grad(self.parameters, self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """As Lightning's precision plugins."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if self.precision == "bf16-true" else before)
        try:
            with torch.autocast(
                self.device, AUTOCAST.get(self.precision), enabled=self.precision in AUTOCAST, cache_enabled=False
            ):
                yield
        finally:
            torch.set_default_dtype(before)


def bare_seconds(bench: Bench, module: TrainingModule, windows: TrainWindows) -> list[float]:
    """Of every timed step in the bare loop."""
    step = BareLoop(module, windows, bench).step
    return timing.step_seconds(step, warmup=bench.warmup, steps=bench.steps, device=bench.device)


def mean_seconds(loop: Callable[..., list[float]], *arguments) -> float:
    return statistics.mean(loop(*arguments))


@contextlib.contextmanager
def as_in_training(bench: Bench) -> Iterator[None]:
    """What train.py does around its steps: the attention kernel that is fastest here, and no search for garbage."""
    plan = bench.plan
    times = kernels.measure(plan.model, plan.data.batch_size, plan.hardware, documents=plan.data.document_mask)
    gc.collect()
    gc.disable()
    try:
        with kernels.prefer(times):
            yield
    finally:
        gc.enable()


class Marks(Callback):
    """Marks the start of training and the end of every optimizer step."""

    def __init__(self, device: str):
        self.laps, self._step = timing.Laps(device), 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.laps.mark()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self.laps.mark()


def lightning_seconds(bench: Bench, module: TrainingModule, windows: TrainWindows) -> list[float]:
    """Of every timed step in the Trainer that train.py would build: what a step costs, without validation and checkpoints."""
    plan = bench.plan
    marks = Marks(bench.device)
    metrics = Metrics(plan.tokens_per_step(), plan.hardware.peak_flops)
    arguments = bench.cfg["trainer"] | {
        "accelerator": plan.hardware.accelerator,
        "precision": plan.hardware.precision,
        "default_root_dir": bench.folder,
        "use_distributed_sampler": False,
        "devices": 1,
        "max_steps": bench.warmup + bench.steps,
        "limit_val_batches": 0,
        "val_check_interval": None,
        "check_val_every_n_epoch": None,  # nor a checkpoint at the end
    }
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*have no `val_dataloader`")  # there is no validation here
    warnings.filterwarnings("ignore", ".*smaller than the logging interval")  # nor a metrics.csv to read
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # the lines of callbacks.progress
        trainer = Trainer(
            **arguments, callbacks=[metrics, *callbacks(bench.cfg), marks], logger=instantiate(bench.cfg["logger"])
        )
        trainer.fit(module, windows)
    return marks.laps.seconds()[bench.warmup :]


def callbacks(cfg: dict) -> list[Callback]:
    """train.py's, but for those that work before the first step or after validation alone, of a model that has a tokenizer."""
    chosen = {name: callback for name, callback in cfg["callbacks"].items() if name not in ("causality", "samples")}
    return [callback for callback in instantiate(chosen).values() if callback is not None]


def draw_steps(laps: list[list[float]], axes) -> None:
    """The time of every step, a line for each repetition."""
    for i, lap in enumerate(laps, 1):
        axes.plot(range(1, len(lap) + 1), [1000 * second for second in lap], lw=1, alpha=0.7, label=f"repetition {i}")
    median = 1000 * statistics.median(itertools.chain(*laps))
    axes.axhline(median, color="black", lw=1, ls="--", label="median")
    axes.set(
        title="Training: the module alone", xlabel="step after warm-up", ylabel="ms", ylim=(0, 1.1 * axes.get_ylim()[1])
    )
    axes.legend(fontsize=7, ncols=2, loc="lower right")


def draw_pairs(times: dict[str, list[float]], axes) -> None:
    """The mean step of both loops, pair by pair."""
    for name, values in times.items():
        axes.plot(range(1, len(values) + 1), [1000 * value for value in values], "o-", label=name)
    axes.set(title="Outside the module", xlabel="pair", ylabel="ms per step", ylim=(0, 1.1 * axes.get_ylim()[1]))
    axes.set_xticks(range(1, len(times["bare"]) + 1))
    axes.legend(fontsize=8, loc="lower right")
