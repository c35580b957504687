"""`python train.py minutes=5`: the model, its dropout and the steps of a run that ends in time.

The size of the model follows from the losses of small runs (`MEASURED`; docs/log.md has the runs), the steps
from a few timed ones. After a fifth of them they are planned once more, from the time that they took.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from lightning import Callback, Trainer
from tqdm import tqdm

from tril.model.causality.model import AUTOCAST
from tril.model.config import GPTConfig
from tril.model.formats import clock, engineering, plural
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
VALIDATION_SHARE, MIN_VALIDATIONS, MAX_VALIDATIONS = 0.1, 2, 10  # of the time, and how many
BEFORE, AFTER = 1.5, 0.8  # seconds from the plan to the first step (the certificate), and after the last validation
STARTUP = 2.0  # seconds of the program before its clock starts: Python, imports and settings
BESIDES = 0.8  # seconds of a validation besides those of its windows: trained weights certified, sample, heads
MIN_STEPS = 20
REPLAN = 1 / 5  # of the steps, after which they are planned once more
START = 1 / 20  # of the steps, after which they are timed: the first ones are slower
MAX_TOKENS = 2048  # in a timed step; larger batches are assumed to take as long per token
MIN_ROUNDS, MIN_SECONDS = 2, 1.0  # of timed steps, after one round for warm-up

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


@dataclass(frozen=True)
class Speed:
    """Seconds per token (`train`: forward and backward, `val`: forward) and per optimizer step (`step`)."""

    train: Stages
    val: float
    step: float

    def stages(self, tokens: int) -> Stages:
        """Seconds of a training step of so many tokens."""
        return tuple((stop, tokens * seconds + self.step) for stop, seconds in self.train)


def mean_seconds(stages: Stages, start: float = 0.0, end: float = 1.0) -> float:
    """Of the steps between two fractions of the run."""
    total, before = 0.0, start
    for stop, seconds in stages:
        after = min(max(stop, start), end)
        total, before = total + (after - before) * seconds, after
    return total / (end - start)


def measure(
    configs: Sequence[GPTConfig], lengths: Mapping[int, float], optim: OptimConfig, tokens: int, hardware: Hardware
) -> list[Speed]:
    """Times a few steps of each model, without compilation, with the options of torch that a run sets.

    Models and lengths take turns: the speed of a machine changes within seconds, and their ratios should not follow it.

    Args:
        lengths: of the training windows, each with the fraction of the run where it ends.
        tokens: of a batch.
    """

    def seconds(task: Callable[[], object]) -> float:
        start = time.perf_counter()
        task()
        if hardware.accelerator != "cpu":
            torch.get_device_module(hardware.accelerator).synchronize()
        return time.perf_counter() - start

    configure_torch(hardware.accelerator)
    sizes = {length: max(1, min(tokens, MAX_TOKENS) // length) for length in lengths}  # windows of a batch
    work = [tasks(config, sizes, optim, hardware) for config in configs]
    rounds, total = [], 0.0  # seconds of each task of each model
    while len(rounds) <= MIN_ROUNDS or total < MIN_SECONDS:
        rounds.append([[seconds(task) for task in each] for each in work])
        total = sum(sum(each) for times in rounds[1:] for each in times)
    longest, speeds = max(lengths), []
    for times in zip(*rounds[1:], strict=True):
        *train, val, step = map(statistics.median, zip(*times, strict=True))
        timed = zip(lengths.items(), train, strict=True)
        stages = tuple((stop, median / (sizes[length] * length)) for (length, stop), median in timed)
        speeds.append(Speed(stages, val / (sizes[longest] * longest), step))
    return speeds


def tasks(
    config: GPTConfig, sizes: Mapping[int, int], optim: OptimConfig, hardware: Hardware
) -> list[Callable[[], object]]:
    """What is timed: forward and backward pass of a batch of each length, a validation step, and an optimizer step.

    Args:
        sizes: windows of a batch, by their length.
    """
    device, dtype = torch.device(hardware.accelerator), AUTOCAST.get(hardware.precision)
    with torch.random.fork_rng(), device:
        model = GPT(config)
        batches = {length: torch.randint(config.vocab_size, (n, length)) for length, n in sizes.items()}
    model.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
    optimizer = build_optimizer(model, optim, hardware.precision)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False):  # as Lightning does
            return model.nll(ids, ids).mean()

    def train(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(ids).backward()

    passes = [partial(train, ids) for ids in batches.values()]
    return [*passes, partial(torch.no_grad()(loss), batches[max(batches)]), optimizer.step]


@dataclass(frozen=True)
class TimePlan:
    """What a time decides of a run.

    Attributes:
        model: the config with the chosen shape and dropout.
        steps: optimizer steps.
        val_check_interval, val_batches: steps between two validations, and batches of each.
        stages: seconds of a step, by the length of its windows.
        val_seconds: of a validation.
        end: time.perf_counter() at the end of the run.
        most: steps after which the text would be read too often.
        reasons: what was chosen and why, in lines.
    """

    model: GPTConfig
    steps: int
    val_check_interval: int
    val_batches: int
    stages: Stages
    val_seconds: float
    end: float
    most: int
    reasons: str


def plan_time(
    model: GPTConfig,
    optim: OptimConfig,
    trainer: TrainerConfig,
    hardware: Hardware,
    *,
    end: float,
    windows: int,
    val_batch_size: int,
    train_tokens: int,
    val_tokens: int,
    lengths: Mapping[int, float],
    keeps: Callable[[str], bool],
) -> TimePlan:
    """Chooses the shape with the lowest predicted loss, the steps that end in time, and dropout.

    Args:
        model: as configured, with its vocabulary.
        trainer: as configured: how often is validated, and on how many batches.
        end: time.perf_counter() at the end of the run.
        windows: of an optimizer step.
        train_tokens, val_tokens: of the two parts of the text.
        lengths: of the training windows, each with the fraction of the run where it ends.
        keeps: whether a setting, such as "model.dim", keeps its configured value.

    Raises:
        ValueError: the time does not suffice for MIN_STEPS steps.
    """
    length, step_tokens = model.context_length, windows * model.context_length
    most = max(MIN_REPEATED_STEPS, MAX_PASSES * train_tokens // step_tokens)
    shapes = list_shapes(model, keeps)
    speeds = measure(shapes, {length: 1.0}, optim, step_tokens, hardware)
    seconds = end - time.perf_counter() - BEFORE - AFTER

    def expected_loss(shape: GPTConfig, speed: Speed) -> float:
        steps = int(seconds * (1 - VALIDATION_SHARE) / mean_seconds(speed.stages(step_tokens)))
        with torch.device("meta"):
            parameters = GPT(shape).n_parameters(embeddings=False)
        return predict_loss(parameters, min(steps, most) * step_tokens)

    shape, _ = min(zip(shapes, speeds, strict=True), key=lambda each: expected_loss(*each))
    [speed] = measure([shape], lengths, optim, step_tokens, hardware)
    stages = speed.stages(step_tokens)
    seconds = end - time.perf_counter() - BEFORE - AFTER
    steps = min(int(seconds * (1 - VALIDATION_SHARE) / mean_seconds(stages)), most)
    whole = -(-val_tokens // (length * val_batch_size))
    batch_seconds = speed.val * val_batch_size * length
    interval, val_batches, val_seconds = plan_validations(steps, seconds, batch_seconds, whole, trainer, keeps)
    steps = min(steps, fit_steps(seconds, mean_seconds(stages), val_seconds, interval))
    if steps < MIN_STEPS:
        raise ValueError(f"minutes leave time for {plural(max(0, steps), 'step')} of at least {MIN_STEPS}; give more")
    passes = steps * step_tokens / train_tokens
    if passes > MAX_PASSES and not keeps("model.resid_dropout"):
        shape = replace(shape, resid_dropout=DROPOUT)
    tokens, per_second = engineering(steps * step_tokens), step_tokens / mean_seconds(stages)
    read = f"read {passes:.1f} times"
    if steps == most:
        read += "; the model would memorize it if it read it more often, so the run ends before the time"
    reasons = [
        f"time    {clock(seconds)} to train and validate, at {per_second:,.0f} tokens/s",
        f"size    {shape.n_layers} layers of {shape.dim}, probably the best for {tokens} tokens",
        f"text    {read}; dropout {shape.resid_dropout:g}",
    ]
    return TimePlan(shape, steps, interval, val_batches, stages, val_seconds, end, most, "\n".join(reasons))


def plan_validations(
    steps: int, seconds: float, batch_seconds: float, whole: int, trainer: TrainerConfig, keeps: Callable[[str], bool]
) -> tuple[int, int, float]:
    """Steps between two validations, batches of each, and its seconds.

    Args:
        steps, seconds: of the run.
        batch_seconds: of a batch.
        whole: batches of the whole validation part.
    """
    share = VALIDATION_SHARE * seconds
    if keeps("trainer.val_check_interval"):
        interval, validations = trainer.val_check_interval, math.ceil(steps / trainer.val_check_interval)
    else:
        affordable = int(share / (whole * batch_seconds + BESIDES))
        validations = min(max(affordable, MIN_VALIDATIONS), MAX_VALIDATIONS)
        interval = math.ceil(steps / (validations - 0.3))  # so that more steps, up to a tenth, add no validation
    if keeps("trainer.limit_val_batches"):
        val_batches = min(whole, trainer.limit_val_batches or whole)
    else:
        val_batches = min(whole, max(1, int((share / max(1, validations) - BESIDES) / batch_seconds)))
    return interval, val_batches, val_batches * batch_seconds + BESIDES


def list_shapes(model: GPTConfig, keeps: Callable[[str], bool]) -> list[GPTConfig]:
    """The configs to choose from: the measured shapes that go with the other settings, with what keeps its value."""
    shapes = []
    for n_layers, dim in MEASURED:
        chosen = {"n_layers": n_layers, "dim": dim}
        with contextlib.suppress(ValueError):
            shapes.append(replace(model, **{key: n for key, n in chosen.items() if not keeps(f"model.{key}")}))
    return [*dict.fromkeys(shapes)] or [model]


def fit_steps(seconds: float, step_seconds: float, val_seconds: float, interval: int, done: int = 0) -> int:
    """The most steps that fit into a time with their validations, one for each interval that has begun.

    Args:
        step_seconds, val_seconds: of a step, and of a validation.
        done: steps before this time.
    """
    before, n = max(0, done - 1) // interval, 1  # validations; one at the end of the last step is still to come
    while True:
        steps, limit = int((seconds - n * val_seconds) / step_seconds), (before + n) * interval - done
        if steps <= limit:
            return max(steps, limit - interval)
        n += 1


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
