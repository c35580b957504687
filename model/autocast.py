"""Autocast by the names of Lightning's precisions, and whether the hardware has bf16."""

import contextlib

import torch

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # the other precisions run without it


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The context of a forward pass in a precision."""
    dtype = AUTOCAST.get(precision)
    # Lightning disables autocast's cache too; with another setting the compiler would make another graph.
    return torch.autocast(device.type, dtype, cache_enabled=False) if dtype else contextlib.nullcontext()


def has_bf16(accelerator: str) -> bool:
    """Whether "cuda", "mps" or "cpu" multiplies bf16 matrices in hardware.

    Emulation does not count: a CPU without AVX512-BF16 or AMX is 40 to 500 times slower in bf16 than in float32
    (https://github.com/pytorch/pytorch/issues/146508).
    """
    if accelerator == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)  # compute capability 8.0 and above
    return accelerator == "cpu" and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
