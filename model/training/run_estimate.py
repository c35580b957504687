"""Estimates how long a run takes on this machine, from a few timed steps."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tril.model.autocast import autocast
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.optim import build_optimizer
from tril.model.training.settings import OptimConfig

MAX_TOKENS = 2048  # in a timed step; larger batches are assumed to take as long per window
REPEATS = 2  # timed repetitions, after one for warm-up
OVERHEAD_SECONDS = 8.0  # of a run besides its steps: imports, causality check, checkpoints, plot


@dataclass(frozen=True)
class Speed:
    """Seconds per window (`train`: forward and backward, `val`: forward) and per optimizer step (`step`)."""

    train: float
    val: float
    step: float

    def run(self, *, steps: int, windows_per_step: int, val_windows: int, validations: int) -> float:
        """Seconds of a complete run."""
        training = steps * (windows_per_step * self.train + self.step)
        return OVERHEAD_SECONDS + training + validations * val_windows * self.val


def measure(config: GPTConfig, optim: OptimConfig, batch_size: int, hardware: Hardware) -> Speed:
    """Times a few steps without compilation, with the options of torch that a run sets."""
    configure_torch(hardware.accelerator)
    device = torch.device(hardware.accelerator)
    batch_size = min(batch_size, max(1, MAX_TOKENS // config.context_length))
    with torch.random.fork_rng(), device:
        model = GPT(config)
        ids = torch.randint(config.vocab_size, (batch_size, config.context_length))
    model.to(torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32)
    optimizer = build_optimizer(model, optim, hardware.precision)

    def loss() -> torch.Tensor:
        with autocast(device, hardware.precision):
            return model.nll(ids, ids).mean()

    def seconds(work: Callable[[], object]) -> float:
        """Of the fastest of a few repetitions."""
        times = []
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            work()
            if device.type != "cpu":
                torch.get_device_module(device.type).synchronize()
            times.append(time.perf_counter() - start)
        return min(times[1:])

    train, val = seconds(lambda: loss().backward()), seconds(torch.no_grad()(loss))
    return Speed(train / batch_size, val / batch_size, seconds(optimizer.step))
