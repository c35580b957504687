"""Estimates how long a run takes on this machine, from a few timed steps."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tril.model.autocast import autocast
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.optim import build_optimizer
from tril.model.training.settings import OptimConfig

MAX_TOKENS = 2048  # in a timed step; larger batches are assumed to take as long per token
MIN_ROUNDS, MIN_SECONDS = 2, 1.0  # of timed steps, after one round for warm-up
OVERHEAD_SECONDS = 8.0  # of a run besides its steps: imports, causality check, checkpoints, plot

# Of each length of training windows, in order: the fraction of the run where it ends, and seconds.
Stages = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Speed:
    """Seconds per token (`train`: forward and backward, `val`: forward) and per optimizer step (`step`)."""

    train: Stages
    val: float
    step: float

    def stages(self, tokens: int) -> Stages:
        """Seconds of a training step of so many tokens."""
        return tuple((stop, tokens * seconds + self.step) for stop, seconds in self.train)

    def run(self, *, steps: int, tokens_per_step: int, val_tokens: int, validations: int) -> float:
        """Seconds of a complete run."""
        training = steps * mean_seconds(self.stages(tokens_per_step))
        return OVERHEAD_SECONDS + training + validations * val_tokens * self.val


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
    configure_torch(hardware.accelerator)
    sizes = {length: max(1, min(tokens, MAX_TOKENS) // length) for length in lengths}  # windows of a batch
    work = [tasks(config, sizes, optim, hardware) for config in configs]
    times: list[dict[int | str, list[float]]] = [{name: [] for name in each} for each in work]
    rounds, total = 0, 0.0
    while rounds <= MIN_ROUNDS or total < MIN_SECONDS:
        for named, kept in zip(work, times, strict=True):
            for name, task in named.items():
                start = time.perf_counter()
                task()
                if hardware.accelerator != "cpu":
                    torch.get_device_module(hardware.accelerator).synchronize()
                if rounds:
                    kept[name].append(time.perf_counter() - start)
                    total += kept[name][-1]
        rounds += 1
    longest, speeds = max(lengths), []
    for kept in times:
        seconds = {name: statistics.median(each) for name, each in kept.items()}
        train = tuple((stop, seconds[length] / (sizes[length] * length)) for length, stop in lengths.items())
        speeds.append(Speed(train, seconds["val"] / (sizes[longest] * longest), seconds["step"]))
    return speeds


def tasks(
    config: GPTConfig, sizes: Mapping[int, int], optim: OptimConfig, hardware: Hardware
) -> dict[int | str, Callable[[], object]]:
    """What is timed: forward and backward pass of a batch of each length, "val", and "step"; see `Speed`.

    Args:
        sizes: windows of a batch, by their length.
    """
    device = torch.device(hardware.accelerator)
    with torch.random.fork_rng(), device:
        model = GPT(config)
        batches = {length: torch.randint(config.vocab_size, (n, length)) for length, n in sizes.items()}
    model.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
    optimizer = build_optimizer(model, optim, hardware.precision)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with autocast(device, hardware.precision):
            return model.nll(ids, ids).mean()

    def train(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(ids).backward()

    work: dict[int | str, Callable[[], object]] = {length: partial(train, ids) for length, ids in batches.items()}
    return work | {"val": partial(torch.no_grad()(loss), batches[max(batches)]), "step": optimizer.step}
