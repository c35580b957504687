"""Turns a failed allocation into one line: what was asked for, and the largest batch that would fit."""

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tril.model.gpt import GPT, GPTConfig
from tril.model.training.errors import OutOfMemory
from tril.model.training.hardware import Hardware
from tril.model.training.step_memory import ALLOCATOR_FACTOR, available_bytes, largest_batch, n_bytes, step_bytes

if TYPE_CHECKING:
    from tril.model.training.module import TrainingModule

# torch's CPU allocator (Linux and macOS, then Windows) and MPS; on CUDA it has an exception of its own.
MESSAGES = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|MPS backend out of memory")
ASKED = re.compile(r"allocate ([\d.,]+ ?(?:bytes|[KMGT]i?B))")
TRAINED_ALONE = ("SingleDeviceStrategy", "DDP")  # each device has the whole model


@contextlib.contextmanager
def memory_errors(trainer: Any, module: "TrainingModule", *, batch_size: int, hardware: Hardware) -> Iterator[None]:
    """Raises OutOfMemory if an allocation fails while the block trains.

    Args:
        trainer: Lightning's Trainer.
        module: before training starts.
        batch_size: windows per device and micro-batch.
    """
    budget, failed = device_bytes(module, hardware.accelerator), None
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        failed = asked_for(error)
    if failed is None:
        return
    gc.collect()  # after the exception, whose frames held the tensors of the step
    where = f"out of memory at step {trainer.global_step + 1:,}{failed}"
    if trainer.validating:
        raise OutOfMemory(f"{where}, in a validation; lower data.val_batch_size (null: data.batch_size={batch_size})")
    batches, length = trainer.accumulate_grad_batches, module.model.config.context_length
    needed = None
    if budget is not None and type(trainer.strategy).__name__ in TRAINED_ALONE:
        with contextlib.suppress(MemoryError, RuntimeError):  # the estimate itself takes some memory
            factor = ALLOCATOR_FACTOR[hardware.accelerator]
            needed = [
                factor * step_bytes(module.model.config, module.optim, size, hardware, accumulate=batches > 1)
                for size in (batch_size, 2 * batch_size)
            ]
    if budget is None or needed is None or needed[0] <= budget:  # unknown, or the estimate is too low
        same = f"raise trainer.accumulate_grad_batches={batches} by the same factor"
        raise OutOfMemory(f"{where}; lower data.batch_size={batch_size} and {same}, or lower model.context_length")
    fits = min(largest_batch((needed[0], needed[1]), batch_size, budget), batch_size - 1)
    need = f"data.batch_size={batch_size} windows of {length:,} tokens need about {needed[0] / 1e9:.3g} GB"
    raise OutOfMemory(f"{where}: {need} of {budget / 1e9:.3g} GB; {remedy(batch_size, fits, batches)}")


def remedy(batch_size: int, fits: int, accumulate: int) -> str:
    """The settings to change if only `fits` windows fit; they keep the windows per step."""
    if fits < 1:
        return "not even one window fits: lower model.context_length, model.dim or model.n_layers"
    size = next(size for size in range(fits, 0, -1) if batch_size % size == 0)
    settings = f"data.batch_size={size} trainer.accumulate_grad_batches={accumulate * batch_size // size}"
    return f"about {fits} would fit; {settings} keeps the tokens per step"


@contextlib.contextmanager
def model_memory(config: GPTConfig) -> Iterator[None]:
    """Raises OutOfMemory if an allocation fails while the block builds the model."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        with torch.device("meta"):
            parameters = GPT(config).n_parameters()
        size = f"{parameters:,} parameters take {4 * parameters / 1e9:,.3g} GB, and about four times that in training"
        raise OutOfMemory(f"out of memory{asked_for(error)}: {size}; lower model.dim or model.n_layers") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or MESSAGES.search(str(error)) is not None


def asked_for(error: BaseException) -> str:
    """What the failed allocation asked for, in words; may be empty."""
    if not (match := ASKED.search(str(error))):
        return ""
    size = match[1]
    if size.endswith("bytes"):
        n_bytes = int(size.split()[0].replace(",", ""))
        size = f"{n_bytes / 1e9:.3g} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"
    return f" (asked for {size})"


def device_bytes(module: "TrainingModule", accelerator: str) -> int | None:
    """Bytes that tensors of this process can take on the device, before training starts; None: unknown."""
    available = available_bytes(accelerator)
    if available is None or accelerator == "cuda":
        return available
    return available + n_bytes(module.parameters())
