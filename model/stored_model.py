"""For callers that do not use `tril.model.checkpoint.build` yet."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tril.model.checkpoint import PREFIX
from tril.model.checkpoint import build as build_from_config
from tril.model.config import MAX_POSITION_ELEMENTS
from tril.model.gpt import GPT, GPTConfig

__all__ = ["MAX_POSITION_ELEMENTS", "PREFIX", "SkipInit", "build"]


def build(values: dict[str, Any], state: dict[str, Tensor], device: torch.device | str) -> GPT:
    return build_from_config(GPTConfig(**values), {k.removeprefix(PREFIX): x for k, x in state.items()}, device)


class SkipInit(TorchFunctionMode):
    """Skips torch.nn.init: other weights follow, and torch's global generator stays unchanged."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
