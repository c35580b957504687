"""A failed allocation becomes one line with the settings that need less memory."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.model.training.tiny_fits import new_model, new_module
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.training import out_of_memory
from tril.model.training.errors import OutOfMemory
from tril.model.training.hardware import Hardware
from tril.model.training.out_of_memory import asked_for, is_out_of_memory, memory_errors, model_memory

CPU = Hardware("cpu", "32-true", None, "a machine", None)
CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB"


def error_of(allocate) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        allocate()
    return caught.value


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (lambda: error_of(lambda: torch.empty(10**15, dtype=torch.uint8)), " (asked for 1e+06 GB)"),
        (lambda: error_of(lambda: np.empty(10**15, np.uint8)), " (asked for 909. TiB)"),
        (lambda: torch.OutOfMemoryError(CUDA_MESSAGE), " (asked for 20.00 MiB)"),
        (lambda: error_of(lambda: [0] * sys.maxsize), ""),
    ],
    ids=["torch", "numpy", "CUDA", "Python"],
)
def test_failed_allocations_are_recognized(error, asked):
    assert is_out_of_memory(error()) and asked_for(error()) == asked


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), memory_errors_of(new_module(new_model())):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def memory_errors_of(module, batch_size=8, accumulate=1, validating=False):
    strategy = type("SingleDeviceStrategy", (), {})()
    trainer = SimpleNamespace(
        global_step=41, accumulate_grad_batches=accumulate, validating=validating, strategy=strategy
    )
    return memory_errors(trainer, module, batch_size=batch_size, hardware=CPU)


@pytest.mark.parametrize(
    ("budget", "accumulate", "text"),
    [
        (165e6, 1, "about 6 would fit; data.batch_size=4 trainer.accumulate_grad_batches=2 keeps the tokens per step"),
        (165e6, 3, "about 6 would fit; data.batch_size=4 trainer.accumulate_grad_batches=6 keeps the tokens per step"),
        (179e6, 1, "about 7 would fit; data.batch_size=4 trainer.accumulate_grad_batches=2 keeps the tokens per step"),
        (110e6, 1, "about 1 would fit; data.batch_size=1 trainer.accumulate_grad_batches=8 keeps the tokens per step"),
        (109e6, 1, "not even one window fits: lower model.context_length, model.dim or model.n_layers"),
    ],
)
def test_the_largest_batch_follows_from_the_bytes_of_two_batches(budget, accumulate, text, monkeypatch):
    """100 MB and 10 MB for each window."""
    monkeypatch.setattr(out_of_memory, "step_bytes", lambda c, o, batch_size, h, accumulate: 100e6 + 10e6 * batch_size)
    monkeypatch.setattr(out_of_memory, "device_bytes", lambda module, accelerator: budget)
    monkeypatch.setattr(out_of_memory, "ALLOCATOR_FACTOR", {"cpu": 1.0})
    with pytest.raises(OutOfMemory) as caught, memory_errors_of(new_module(new_model()), accumulate=accumulate):
        torch.empty(10**15, dtype=torch.uint8)
    need = "data.batch_size=8 windows of 12 tokens need about 0.18 GB"
    assert (
        str(caught.value) == f"out of memory at step 42 (asked for 1e+06 GB): {need} of {budget / 1e9:.3g} GB; {text}"
    )


@pytest.mark.parametrize(
    ("budget", "validating", "text"),
    [
        (None, False, "; lower data.batch_size=8 and raise trainer.accumulate_grad_batches=1 by the same factor, or "),
        (1e15, False, "; lower data.batch_size=8 and raise trainer.accumulate_grad_batches=1 by the same factor, or "),
        (None, True, ", in a validation; lower data.val_batch_size (null: data.batch_size=8)"),
    ],
)
def test_settings_are_named_where_the_estimate_does_not_help(budget, validating, text, monkeypatch):
    monkeypatch.setattr(out_of_memory, "step_bytes", lambda c, o, batch_size, h, accumulate: 1e6 * batch_size)
    monkeypatch.setattr(out_of_memory, "device_bytes", lambda module, accelerator: budget)
    with pytest.raises(OutOfMemory) as caught, memory_errors_of(new_module(new_model()), validating=validating):
        raise MemoryError
    assert str(caught.value).startswith(f"out of memory at step 42{text}")


TABLE = {"n_heads": 0, "mlp_hidden": 1, "n_layers": 1, "pos": "none"}  # nearly all is the embedding


def test_a_model_that_does_not_fit():
    config = GPTConfig(vocab_size=10**13, dim=8, **TABLE)
    with pytest.raises(OutOfMemory) as caught, model_memory(config):
        GPT(config)
    assert "80,000,000,000,032 parameters take 3.2e+05 GB" in str(caught.value)
    assert str(caught.value).endswith("; lower model.dim or model.n_layers")
