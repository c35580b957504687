"""`tril train minutes=5`: the model, its weight decay and the steps of a run that ends in time.

Timed steps of one size and FLOPs give the time of every size. After a fifth of the steps they are planned once more.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from lightning import Callback, Fabric, Trainer
from tqdm import tqdm

from tril.model.config import GPTConfig
from tril.model.formats import clock, engineering
from tril.model.gpt import GPT
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.module import TrainingModule
from tril.model.training.optim import DECAYS, build_optimizer, suitable_decay
from tril.model.training.schedule import lr_factor
from tril.model.training.settings import OptimConfig, ScheduleConfig, TrainerConfig

SHAPES = ((2, 128), (3, 160), (4, 192))  # n_layers and dim to choose from; docs/log.md has their losses
# Of the blocks: with fewer, a smaller model, which reads more in the same time, has the lower loss.
TOKENS_PER_PARAMETER = 1.5
# With more passes over a text, models memorize it: their validation loss rises. But short runs need some steps.
MAX_PASSES, MIN_REPEATED_STEPS = 4, 200
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


def seconds_per_flop(config: GPTConfig, optim: OptimConfig, tokens: int, hardware: Hardware, limit: float) -> float:
    """Seconds of a training step divided by its FLOPs, from steps of a model without compilation.

    Args:
        tokens: of a step.
        limit: seconds for all steps; two are made in any case, of which the first one, which is slow, does not count.
    """
    start, seconds = time.perf_counter(), list[float]()
    configure_torch(hardware.accelerator)
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


@dataclass(frozen=True)
class TimePlan:
    """What a time decides of a run.

    Attributes:
        model: the config with the chosen shape.
        optim: with the chosen weight decay.
        steps: optimizer steps.
        val_check_interval: steps between two validations.
        step_seconds: of a step, on average over the lengths of its windows.
        val_seconds: of a validation.
        end: time.perf_counter() at the end of the run.
        most: steps after which the text would be read too often.
        reasons: what was chosen and why, in lines.
    """

    model: GPTConfig
    optim: OptimConfig
    steps: int
    val_check_interval: int
    step_seconds: float
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
    """Chooses the largest shape that reads enough in the time, the steps that end in time, and weight decay.

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
    shapes, step_tokens = list_shapes(model, keeps), windows * model.context_length
    limit = min(TIMING_SECONDS, TIMING_SHARE * (end - time.perf_counter()))
    per_flop = seconds_per_flop(shapes[len(shapes) // 2], optim, step_tokens, hardware, limit)
    seconds = end - time.perf_counter() - BEFORE - AFTER
    most = max(MIN_REPEATED_STEPS, MAX_PASSES * train_tokens // step_tokens)
    for shape in reversed(shapes):
        gpt = GPT.without_values(shape)
        step_seconds = step_tokens * per_flop * gpt.flops_per_token(lengths)
        val_seconds = val_tokens * FORWARD * per_flop * gpt.flops_per_token() + BESIDES
        validations = min(max(1, int(VALIDATION_SHARE * seconds / val_seconds)), MAX_VALIDATIONS)
        possible = int((seconds - validations * val_seconds) / step_seconds)
        if possible * step_tokens >= TOKENS_PER_PARAMETER * gpt.n_parameters(embeddings=False):
            break
    # up to a tenth more steps in the second plan add no validation
    interval = max(1, math.ceil(min(possible, most) / (validations - 0.3)))
    if keeps("trainer.val_check_interval"):
        interval = trainer.val_check_interval
    steps = min(most, fit_steps(seconds, step_seconds, val_seconds, interval))
    if steps < MIN_STEPS or val_seconds > seconds / 2:
        least = max(MIN_STEPS * step_seconds + val_seconds, 2 * val_seconds)
        cause = (
            f"leaves {max(0, seconds):.0f} s to train and validate, and {least:.0f} s are needed for {MIN_STEPS} steps"
        )
        raise ValueError(f"minutes {cause}; raise it, or lower the time of a validation with trainer.limit_val_batches")
    passes = steps * step_tokens / train_tokens
    if optim.kind == "muon" and not any(keeps(f"optim.{key}") for key in DECAYS):
        optim = replace(optim, **dict.fromkeys(DECAYS, suitable_decay(passes)))
    read = f"the run reads it {passes:.1f} times, with a weight decay of {optim.weight_decay:g}"
    if steps == most:
        read += "; it ends before the time, since more passes would not lower the loss"
    tokens = f"{engineering(steps * step_tokens)} tokens"
    reasons = [
        f"time    {clock(seconds)} is left to train and validate, at {step_tokens / step_seconds:,.0f} tokens/s",
        f"size    {shape.n_layers} layers of {shape.dim} suit a run of {tokens}",
        f"text    {read}",
    ]
    return TimePlan(shape, optim, steps, interval, step_seconds, val_seconds, end, most, "\n".join(reasons))


def list_shapes(model: GPTConfig, keeps: Callable[[str], bool]) -> list[GPTConfig]:
    """The configs to choose from: those of SHAPES that go with the other settings, with what keeps its value."""
    shapes = []
    for n_layers, dim in SHAPES:
        chosen = {"n_layers": n_layers, "dim": dim}
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
    """Plans the steps once more after a fifth of them, from the time that they took.

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
        self._times: dict[int, tuple[float, float]] = {}  # after a step: seconds of training, and the time

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainingModule, batch, batch_idx: int) -> None:
        """Comes after the validation of the step before."""
        step, data = trainer.global_step, trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue] set by fit
        if step not in (self._first, self._at) or step in self._times:
            return
        self._times[step] = Metrics.of(trainer).seconds(), time.perf_counter()
        steps = self._new_steps(pl_module.model, data.lengths) if step == self._at else None
        if steps not in (None, self.plan.steps):
            trainer.fit_loop.epoch_loop.max_steps = steps
            pl_module.set_total_steps(steps)
            self._record(steps)
            tqdm.write(f"step {step:>6,}  the rest is planned again: {steps:,} steps instead of {self.plan.steps:,}")

    def _new_steps(self, model: GPT, lengths: Mapping[int, float]) -> int | None:
        """The new number of steps; None: learning rate or length of the windows would have changed before."""
        plan, first, at = self.plan, self._first, self._at
        (trained, began), (now_trained, now) = self._times[first], self._times[at]
        step_seconds, part = (now_trained - trained) / (at - first), at / plan.steps
        # FLOPs of all steps relative to the first ones, which have the shortest windows
        growth = model.flops_per_token(lengths) / model.flops_per_token({min(lengths): 1.0})
        if validations := at // plan.val_check_interval - first // plan.val_check_interval:
            val_seconds = (now - began - now_trained + trained) / validations
        else:
            val_seconds = plan.val_seconds * step_seconds * growth / plan.step_seconds
        later, done = step_seconds * (growth - part) / (1 - part), at % plan.val_check_interval
        steps = at + fit_steps(plan.end - now - AFTER, later, val_seconds, plan.val_check_interval, done)
        constant = (
            n
            for n in range(at + 1, plan.steps + 1)
            if lr_factor(at, n, self.schedule) == 1 and at < n * min(lengths.values())
        )
        least = next(constant, None)
        return None if least is None else max(least, min(steps, plan.most))
