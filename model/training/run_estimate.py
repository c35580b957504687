"""Estimates how long a run takes on this machine, from a few timed steps."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from tril.model.autocast import autocast
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.optim import build_optimizer
from tril.model.training.settings import OptimConfig

MAX_TOKENS = 2048  # in a timed step; larger batches are assumed to take as long per token
MIN_ROUNDS, MIN_SECONDS = 2, 0.5  # of timed steps, after one round for warm-up
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
    config: GPTConfig, lengths: Mapping[int, float], optim: OptimConfig, tokens: int, hardware: Hardware
) -> Speed:
    """Times a few steps without compilation, with the options of torch that a run sets.

    The lengths take turns: the speed of a machine changes within seconds, and their ratio should not follow it.

    Args:
        lengths: of the training windows, each with the fraction of the run where it ends.
        tokens: of a batch.
    """
    configure_torch(hardware.accelerator)
    device = torch.device(hardware.accelerator)
    with torch.random.fork_rng(), device:
        model = GPT(config)
        batches = {n: torch.randint(config.vocab_size, (max(1, min(tokens, MAX_TOKENS) // n), n)) for n in lengths}
    model.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
    optimizer = build_optimizer(model, optim, hardware.precision)
    longest = batches[max(batches)]

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with autocast(device, hardware.precision):
            return model.nll(ids, ids).mean()

    def train(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss(ids).backward()

    work: dict[int | str, Callable[[], object]] = {n: partial(train, ids) for n, ids in batches.items()}
    work |= {"val": partial(torch.no_grad()(loss), longest), "step": optimizer.step}
    times: dict[int | str, list[float]] = {name: [] for name in work}
    rounds = 0
    while rounds <= MIN_ROUNDS or sum(map(sum, times.values())) < MIN_SECONDS:
        for name, task in work.items():
            start = time.perf_counter()
            task()
            if device.type != "cpu":
                torch.get_device_module(device.type).synchronize()
            if rounds:
                times[name].append(time.perf_counter() - start)
        rounds += 1
    seconds = {name: statistics.median(each) for name, each in times.items()}
    per_token = tuple((stop, seconds[n] / batches[n].numel()) for n, stop in lengths.items())
    return Speed(per_token, seconds["val"] / longest.numel(), seconds["step"])
