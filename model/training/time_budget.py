"""`tril train minutes=5`: the model, its weight decay and the steps of a run that ends in time.

Timed steps of one size and FLOPs give the time of every size. After a fifth of the steps they are planned once more.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from lightning import Callback, Fabric, Trainer
from tqdm import tqdm

from tril.data.datamodule import TextDataModule
from tril.data.settings import unflatten
from tril.model.config import GPTConfig
from tril.model.formats import clock, engineering
from tril.model.gpt import GPT
from tril.model.runs import Run
from tril.model.training.hardware import Hardware
from tril.model.training.module import TrainingModule
from tril.model.training.optim import DECAYS, build_optimizer, suitable_decay
from tril.model.training.schedule import lr_factor
from tril.model.training.settings import OptimConfig, TrainingConfig

Config = TypeVar("Config", bound=TrainingConfig)
SHAPES = ((2, 128, 2), (3, 160, 2), (4, 192, 2), (6, 384, 4), (8, 576, 6))  # n_layers, dim, n_heads; see docs/log.md
# Of the blocks: with fewer, a smaller model has the lower loss, if it reads more in the same time.
TOKENS_PER_PARAMETER = 1.5
MIN_TEXT = 0.2  # tokens per parameter that the text must offer in its passes
# With more passes over a text, models memorize it: their validation loss rises. But short runs need some steps.
MAX_PASSES, MIN_REPEATED_STEPS = 4, 200
TIMING_SHARE, TIMING_SECONDS = 1 / 20, 3.0  # of the time, and at most: for timed steps
MAX_TOKENS = 2048  # in a timed step; larger batches are assumed to take as long per token
VALIDATION_SHARE, MAX_VALIDATIONS = 0.1, 10  # of the time, for more than the last validation; and how many
FORWARD = 1 / 3  # of the FLOPs of training
BEFORE, AFTER = 1.5, 0.8  # seconds from the plan to the first step (the certificate), and after the last validation
PLANNED = 0.98  # of the time: the speed of a machine varies
STARTUP = 2.0  # seconds of the program before its clock starts: Python, imports and settings
BESIDES = 0.8  # seconds of a validation besides those of its windows: trained weights certified, sample, heads
MIN_STEPS = 20
REPLAN = 1 / 5  # of the steps, after which they are planned once more
START = 1 / 20  # of the steps, after which they are timed: the first ones are slower


def seconds_per_flop(config: GPTConfig, optim: OptimConfig, tokens: int, hardware: Hardware, limit: float) -> float:
    """Seconds of a training step divided by its FLOPs, from steps of a model without compilation.

    Args:
        tokens: of a step.
        limit: seconds for all steps; two are made in any case, of which the first one, which is slow, does not count.
    """
    start, seconds = time.perf_counter(), list[float]()
    fabric = Fabric(accelerator=hardware.accelerator, devices=1, precision=hardware.precision)  # pyright: ignore[reportArgumentType]
    with fabric.init_module():
        model = GPT(config)
    optimizer, length = build_optimizer(model, optim, hardware.precision), config.context_length
    ids = torch.randint(config.vocab_size, (max(1, min(tokens, MAX_TOKENS) // length), length), device=fabric.device)
    while len(seconds) < 2 or time.perf_counter() - start + seconds[-1] < limit:
        began = time.perf_counter()
        optimizer.zero_grad()
        with fabric.autocast():
            loss = model.nll(ids, ids).mean()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:]) / (ids.numel() * model.flops_per_token())


def plan_time(
    config: Config, data: TextDataModule, *, end: float, keeps: Callable[[str], bool]
) -> tuple[Config, "PlanSteps"]:
    """Chooses the largest shape that reads enough in the time, the steps that end in time, and weight decay.

    Prints the choices and the reasons.

    Args:
        config: with its hardware and its vocabulary.
        data: prepared.
        end: time.perf_counter() at the end of the run.
        keeps: whether a setting, such as "model.dim", keeps its configured value.

    Returns:
        The settings of the run, and the callback that plans its steps once more.

    Raises:
        ValueError: the time does not suffice for MIN_STEPS steps and a validation.
    """
    assert config.hardware is not None
    shapes, step_tokens, optim = list_shapes(config.model, keeps), config.tokens_per_step(), config.optim
    train_tokens, val_tokens = (data.meta["counts"][part]["tokens"] for part in ("train", "val"))
    if scored := config.trainer.limit_val_batches:
        val_tokens = min(val_tokens, scored * data.val_batch_size * data.context_length)
    limit = min(TIMING_SECONDS, TIMING_SHARE * (end - time.perf_counter()))
    per_flop = seconds_per_flop(shapes[len(shapes) // 2], optim, step_tokens, config.hardware, limit)
    seconds = end - time.perf_counter() - BEFORE - AFTER
    most = max(MIN_REPEATED_STEPS, MAX_PASSES * train_tokens // step_tokens)
    for shape in reversed(shapes):
        gpt = GPT.without_values(shape)
        step_seconds = step_tokens * per_flop * gpt.flops_per_token(data.lengths)
        val_seconds = val_tokens * FORWARD * per_flop * gpt.flops_per_token() + BESIDES
        validations = min(max(1, int(VALIDATION_SHARE * seconds / val_seconds)), MAX_VALIDATIONS)
        possible = int((seconds - validations * val_seconds) / step_seconds)
        needed = gpt.n_parameters(embeddings=False) / step_tokens
        if possible >= min(most, TOKENS_PER_PARAMETER * needed) and most >= MIN_TEXT * needed:
            break
    interval = config.trainer.val_check_interval
    if not keeps("trainer.val_check_interval"):  # up to a tenth more steps in the second plan add no validation
        interval = max(1, math.ceil(min(possible, most) / (validations - 0.3)))
    steps = min(most, fit_steps(seconds, step_seconds, val_seconds, interval))
    if steps < MIN_STEPS or val_seconds > seconds / 2:
        needed = max(MIN_STEPS * step_seconds + val_seconds, 2 * val_seconds)
        problem = f"{MIN_STEPS} steps with a validation take {needed:.0f} s, and minutes leaves {max(0, seconds):.0f} s"
        raise ValueError(f"{problem}; raise minutes, or shorten the validation with trainer.limit_val_batches")
    passes = steps * step_tokens / train_tokens
    if optim.kind == "muon" and not any(keeps(f"optim.{key}") for key in DECAYS):
        optim = replace(optim, **dict.fromkeys(DECAYS, suitable_decay(optim, steps, passes)))
    print(f"time    {clock(seconds)} is left to train and validate, at {step_tokens / step_seconds:,.0f} tokens/s")
    print(f"size    {shape.n_layers} layers of {shape.dim} suit a run of {engineering(steps * step_tokens)} tokens")
    ends = "; it ends before the time, since more passes would not lower the loss" if steps == most else ""
    decay = f"with a weight decay of {optim.weight_decay:g}"
    print(f"text    the run reads it {passes:.1f} times, {decay}{ends}", flush=True)
    trainer = replace(config.trainer, max_steps=steps, val_check_interval=interval)
    planned = replace(config, model=shape, optim=optim, trainer=trainer)
    return planned, PlanSteps(planned, step_seconds=step_seconds, val_seconds=val_seconds, end=end, most=most)


def list_shapes(model: GPTConfig, keeps: Callable[[str], bool]) -> list[GPTConfig]:
    """The configs to choose from: those of SHAPES that go with the other settings, with what keeps its value."""
    shapes = []
    for n_layers, dim, n_heads in SHAPES:
        of_width = {} if keeps("model.dim") else {"dim": dim, "n_heads": n_heads}
        chosen = {"n_layers": n_layers} | of_width
        with contextlib.suppress(ValueError):
            shapes.append(replace(model, **{key: n for key, n in chosen.items() if not keeps(f"model.{key}")}))
    return [*dict.fromkeys(shapes)] or [model]


def fit_steps(seconds: float, step_seconds: float, val_seconds: float, interval: int, done: int = 0) -> int:
    """The most steps that fit into a time with their validations; below 0: not even the last validation fits.

    Args:
        step_seconds, val_seconds: of a step, and of a validation, which ends each interval and the run.
        done: steps since the last validation.
    """
    counts = range(1, int(seconds / val_seconds) + 1)  # of validations
    return max((min(n * interval - done, int((seconds - n * val_seconds) / step_seconds)) for n in counts), default=-1)


class PlanSteps(Callback):
    """Plans the steps once more after a fifth of them: training is as much slower than planned as it was up to there.

    Learning rate and length of the windows are constant up to there and somewhat longer, so the run equals one that had
    the new number of steps from the start.

    Args:
        config: with the steps and the validations of the first plan.
        step_seconds: of a step in the first plan, on average over the lengths of its windows.
        val_seconds: of a validation in it.
        end: time.perf_counter() at the end of the run.
        most: steps after which the text would be read too often.
    """

    def __init__(
        self, config: TrainingConfig, *, step_seconds: float, val_seconds: float, end: float, most: int
    ) -> None:
        self.schedule, self.interval = config.optim.schedule, config.trainer.val_check_interval
        self.steps, self.most, self.end = config.trainer.max_steps, most, end
        self.step_seconds, self.val_seconds = step_seconds, val_seconds
        self._first, self._at = max(1, int(START * self.steps)), int(REPLAN * self.steps)
        self._began = 0.0  # time.perf_counter() after the first steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        """Comes after the validation of the step before."""
        step, now = trainer.global_step, time.perf_counter()
        if step == self._first:
            self._began = self._began or now
        if step == self._at:
            model, lengths = pl_module.model, pl_module.data.lengths
            # FLOPs of all steps relative to the first ones, which have the shortest windows
            growth = model.flops_per_token(lengths) / model.flops_per_token({min(lengths): 1.0})
            steps = self.new_steps(now, growth, min(lengths.values()))
            self._at = 0  # once, also with several micro-batches
            trainer.fit_loop.epoch_loop.max_steps = pl_module.total_steps = steps
            settings = pl_module.payload["settings"] = pl_module.payload["settings"] | {"trainer.max_steps": steps}
            Run(Path(trainer.default_root_dir)).write_settings(unflatten(settings))
            tqdm.write(f"step {step:>6,}  planned again: {steps:,} steps, {self.steps:,} before")

    def new_steps(self, now: float, growth: float, shortest: float) -> int:
        """The steps of the run from what is left of the time.

        Args:
            now: time.perf_counter().
            growth: the mean FLOPs of all planned steps relative to those of the first ones.
            shortest: the share of the run that has the shortest windows.
        """
        first, at, early = self._first, self._at, self.step_seconds / growth
        validations = at // self.interval - first // self.interval
        slower = (now - self._began) / ((at - first) * early + validations * self.val_seconds)
        later = slower * early * (growth - at / self.steps) / (1 - at / self.steps)  # seconds of a step
        left = self.end - now - AFTER
        steps = at + fit_steps(left, later, slower * self.val_seconds, self.interval, at % self.interval)
        # numbers of steps with which learning rate and length of the windows would have been the same so far
        same = [n for n in range(at + 1, self.steps + 1) if lr_factor(at, n, self.schedule) == 1 and at < n * shortest]
        return max(same[0], min(steps, self.most)) if same else self.steps
