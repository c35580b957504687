"""`python train.py minutes=5`: the model, its dropout and the steps of a run that ends in time.

The size follows from the losses of small runs (`MEASURED`; docs/log.md has the runs). The steps follow from timed ones
of one size, and FLOPs give the time of the others. After a fifth of the steps they are planned once more.
"""

import bisect
import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from lightning import Callback, Fabric, Trainer
from tqdm import tqdm

from tril.model.config import GPTConfig
from tril.model.formats import clock, engineering
from tril.model.gpt import GPT
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.module import TrainingModule
from tril.model.training.optim import build_optimizer
from tril.model.training.schedule import lr_factor
from tril.model.training.settings import OptimConfig, ScheduleConfig, TrainerConfig

# Bits per byte on the default text after 1, 2, 4, 8 and, but for the largest, 16 UNIT_TOKENS, by n_layers and dim; of
# windows of 256 tokens throughout. Only their order decides.
MEASURED = {
    (2, 128): (1.7904, 1.5810, 1.4434, 1.3418, 1.2817),
    (3, 160): (1.7585, 1.5446, 1.3893, 1.2704, 1.2006),
    (4, 192): (1.7131, 1.5081, 1.3561, 1.2338),
}
UNIT_TOKENS = 125 * 2048
# With more passes over a text, models memorize it: their validation loss rises. But short runs need some steps.
MAX_PASSES, MIN_REPEATED_STEPS = 4, 200
DROPOUT = 0.1  # of a text that is read more often
TIMING_SHARE, TIMING_SECONDS = 1 / 20, 3.0  # of the time, and at most: for timed steps
MAX_TOKENS = 2048  # in a timed step; larger batches are assumed to take as long per token
VALIDATION_SHARE, MAX_VALIDATIONS = 0.1, 10  # of the time, for more than the last validation; and how many
FORWARD = 1 / 3  # of the FLOPs of training
BEFORE, AFTER = 1.5, 0.8  # seconds from the plan to the first step (the certificate), and after the last validation
STARTUP = 2.0  # seconds of the program before its clock starts: Python, imports and settings
BESIDES = 0.8  # seconds of a validation besides those of its windows: trained weights certified, sample, heads
MIN_STEPS = 20
REPLAN = 1 / 5  # of the steps, after which they are planned once more
START = 1 / 20  # of the steps, after which they are timed: the first ones are slower

# Of each length of training windows, in order: the fraction of the run where it ends, and seconds.
Stages = tuple[tuple[float, float], ...]


def predict_loss(parameters: int, tokens: int) -> float:
    """Bits per byte on the default text, interpolated between the measured ones.

    Linear in the logarithms of both; more tokens than measured continue the last line, and sizes outside of the
    measured ones have the loss of the nearest.

    Args:
        parameters: of the blocks.
        tokens: of training.
    """
    doublings = math.log2(max(tokens, 1) / UNIT_TOKENS)
    sizes, losses = [], []
    for (n_layers, dim), measured in MEASURED.items():
        i = min(max(int(doublings), 0), len(measured) - 2)
        sizes.append(math.log(12 * n_layers * dim**2))
        losses.append(measured[i] + (doublings - i) * (measured[i + 1] - measured[i]))
    return float(np.interp(math.log(parameters), sizes, losses))


def mean_seconds(stages: Stages, start: float = 0.0, end: float = 1.0) -> float:
    """Of the steps between two fractions of the run."""
    total, before = 0.0, start
    for stop, seconds in stages:
        after = min(max(stop, start), end)
        total, before = total + (after - before) * seconds, after
    return total / (end - start)


def seconds_per_flop(config: GPTConfig, optim: OptimConfig, tokens: int, hardware: Hardware, limit: float) -> float:
    """Seconds of a training step divided by its FLOPs, from steps of a model without compilation.

    Args:
        tokens: of a step.
        limit: seconds for all steps; one is made in any case.
    """
    start, seconds = time.perf_counter(), list[float]()
    configure_torch(hardware.accelerator)
    fabric = Fabric(accelerator=hardware.accelerator, devices=1, precision=hardware.precision)  # pyright: ignore[reportArgumentType]
    with fabric.init_module():
        model = GPT(config)
    optimizer, length = build_optimizer(model, optim, hardware.precision), config.context_length
    ids = torch.randint(config.vocab_size, (max(1, min(tokens, MAX_TOKENS) // length), length), device=fabric.device)
    while not seconds or time.perf_counter() - start + seconds[-1] < limit:
        began = time.perf_counter()
        optimizer.zero_grad()
        with fabric.autocast():
            loss = model.nll(ids, ids).mean()
        loss.backward()
        optimizer.step()
        if hardware.accelerator != "cpu":
            torch.get_device_module(hardware.accelerator).synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:] or seconds) / (ids.numel() * model.flops_per_token())


@dataclass(frozen=True)
class TimePlan:
    """What a time decides of a run.

    Attributes:
        model: the config with the chosen shape and dropout.
        steps: optimizer steps.
        val_check_interval: steps between two validations.
        stages: seconds of a step, by the length of its windows.
        val_seconds: of a validation.
        end: time.perf_counter() at the end of the run.
        most: steps after which the text would be read too often.
        reasons: what was chosen and why, in lines.
    """

    model: GPTConfig
    steps: int
    val_check_interval: int
    stages: Stages
    val_seconds: float
    end: float
    most: int
    reasons: str = ""


def plan_time(
    model: GPTConfig,
    optim: OptimConfig,
    trainer: TrainerConfig,
    hardware: Hardware,
    *,
    end: float,
    windows: int,
    train_tokens: int,
    val_tokens: int,
    lengths: Mapping[int, float],
    keeps: Callable[[str], bool],
) -> TimePlan:
    """Chooses the shape with the lowest predicted loss, the steps that end in time, and dropout.

    Args:
        model: as configured, with its vocabulary.
        trainer: as configured: how often is validated.
        end: time.perf_counter() at the end of the run.
        windows: of an optimizer step.
        train_tokens: of the training text.
        val_tokens: of a validation.
        lengths: of the training windows, each with the fraction of the run where it ends.
        keeps: whether a setting, such as "model.dim", keeps its configured value.

    Raises:
        ValueError: the time does not suffice for MIN_STEPS steps and a validation.
    """
    length, step_tokens, shapes = model.context_length, windows * model.context_length, list_shapes(model, keeps)
    limit = min(TIMING_SECONDS, TIMING_SHARE * (end - time.perf_counter()))
    per_flop = seconds_per_flop(shapes[len(shapes) // 2], optim, step_tokens, hardware, limit)
    seconds = end - time.perf_counter() - BEFORE - AFTER
    most = max(MIN_REPEATED_STEPS, MAX_PASSES * train_tokens // step_tokens)

    def plan(shape: GPTConfig) -> tuple[float, TimePlan]:
        """The predicted loss of a shape, and its run."""
        with torch.device("meta"):
            gpt = GPT(shape)
        of_a_token = {each: per_flop * gpt.flops_per_token({each: 1.0}) for each in lengths}
        stages = tuple((stop, step_tokens * of_a_token[each]) for each, stop in lengths.items())
        val_seconds = val_tokens * FORWARD * of_a_token[length] + BESIDES
        validations = min(max(1, int(VALIDATION_SHARE * seconds / val_seconds)), MAX_VALIDATIONS)
        steps = min(int((seconds - validations * val_seconds) / mean_seconds(stages)), most)
        interval = max(1, math.ceil(steps / (validations - 0.3)))  # up to a tenth more steps add no validation
        if keeps("trainer.val_check_interval"):
            interval = trainer.val_check_interval
        steps = min(most, fit_steps(seconds, mean_seconds(stages), val_seconds, interval))
        loss = predict_loss(gpt.n_parameters(embeddings=False), steps * step_tokens)
        return loss, TimePlan(shape, steps, interval, stages, val_seconds, end, most)

    _, best = min(map(plan, shapes), key=lambda each: each[0])
    if best.steps < MIN_STEPS or best.val_seconds > seconds / 2:
        least = f"{MIN_STEPS} steps and a validation of {best.val_seconds:.0f} s, which may take half of the time"
        raise ValueError(
            f"minutes leave {max(0, seconds):.0f} s for {least}; give more, or set trainer.limit_val_batches"
        )
    shape, passes = best.model, best.steps * step_tokens / train_tokens
    if passes > MAX_PASSES and not keeps("model.resid_dropout"):
        shape = replace(shape, resid_dropout=DROPOUT)
    tokens, per_second = engineering(best.steps * step_tokens), step_tokens / mean_seconds(best.stages)
    read = f"read {passes:.1f} times"
    if best.steps == most:
        read += "; the model would memorize it if it read it more often, so the run ends before the time"
    reasons = [
        f"time    {clock(seconds)} to train and validate, at {per_second:,.0f} tokens/s",
        f"size    {shape.n_layers} layers of {shape.dim}, probably the best for {tokens} tokens",
        f"text    {read}; dropout {shape.resid_dropout:g}",
    ]
    return replace(best, model=shape, reasons="\n".join(reasons))


def list_shapes(model: GPTConfig, keeps: Callable[[str], bool]) -> list[GPTConfig]:
    """The configs to choose from: the measured shapes that go with the other settings, with what keeps its value."""
    shapes = []
    for n_layers, dim in MEASURED:
        chosen = {"n_layers": n_layers, "dim": dim}
        with contextlib.suppress(ValueError):
            shapes.append(replace(model, **{key: n for key, n in chosen.items() if not keeps(f"model.{key}")}))
    return [*dict.fromkeys(shapes)] or [model]


def fit_steps(seconds: float, step_seconds: float, val_seconds: float, interval: int, done: int = 0) -> int:
    """The most steps that fit into a time with their validations; below 0: not even the validation fits.

    Args:
        step_seconds, val_seconds: of a step, and of a validation, which ends each interval and the run.
        done: steps before this time; the validation of the last one is still to come.
    """

    def cost(steps: int) -> float:
        validations = math.ceil((done + steps) / interval) - max(0, done - 1) // interval
        return steps * step_seconds + validations * val_seconds

    return bisect.bisect_right(range(max(0, int(seconds / step_seconds)) + 1), seconds, key=cost) - 1


class PlanSteps(Callback):
    """Plans the steps once more after a fifth of them, from the time that they took and the later length of windows.

    Learning rate and length of the windows are constant up to there and somewhat longer, so the run equals one that had
    the new number of steps from the start.

    Args:
        plan: the first one.
        schedule: of the learning rate.
        record: keeps the new number of steps in the settings of the run.
    """

    def __init__(self, plan: TimePlan, schedule: ScheduleConfig, record: Callable[[int], None]) -> None:
        self.plan, self.schedule, self._record = plan, schedule, record
        self._first, self._at = max(1, int(START * plan.steps)), int(REPLAN * plan.steps)
        self._since: tuple[float, float] | None = None  # at the end of step `_first`: seconds of training, and the time
        self._is_done = not self._begins(self._at, plan.steps)

    def _begins(self, step: int, steps: int) -> bool:
        """Whether `step` is after the warm-up and before the learning rate and the windows of so many steps change."""
        return lr_factor(step, steps, self.schedule) == 1 and step <= self.plan.stages[0][0] * steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        step, seconds, now = trainer.global_step, Metrics.of(trainer).seconds(), time.perf_counter()
        if self._since is None and step >= self._first:
            self._since = seconds, now
        if self._is_done or step != self._at or self._since is None:
            return
        self._is_done, plan = True, self.plan
        trained = seconds - self._since[0]
        step_seconds, end = trained / (step - self._first), step / plan.steps
        slower = step_seconds / mean_seconds(plan.stages, self._first / plan.steps, end)  # than planned
        # a step ends before its validation
        before, done = ((each - 1) // plan.val_check_interval for each in (self._first, step))
        if done > before:  # a validation takes longer than its forward passes: it has a checkpoint and a sample, too
            validation = (now - self._since[1] - trained) / (done - before)
        else:
            validation = plan.val_seconds * slower
        later = slower * mean_seconds(plan.stages, end)
        more = fit_steps(plan.end - now - AFTER, later, validation, plan.val_check_interval, step)
        least = next(n for n in range(step + 1, plan.steps + 1) if self._begins(step, n))
        steps = max(least, min(step + more, plan.most))
        trainer.fit_loop.epoch_loop.max_steps = steps
        pl_module.set_total_steps(steps)
        self._record(steps)
        tqdm.write(f"step {step:>6,}  takes {step_seconds:.3f} s: {steps:,} steps instead of {plan.steps:,}")
