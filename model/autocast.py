"""Autocast by the names of Lightning's precisions."""

import contextlib

import torch

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}  # the other precisions run without it


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """The context of a forward pass in a precision."""
    dtype = AUTOCAST.get(precision)
    # Lightning disables autocast's cache too; with another setting the compiler would make another graph.
    return torch.autocast(device.type, dtype, cache_enabled=False) if dtype else contextlib.nullcontext()
