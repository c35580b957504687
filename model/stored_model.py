"""For callers that do not use `tril.model.checkpoint.build` yet."""

from typing import Any

import torch
from torch import Tensor

from tril.model.checkpoint import PREFIX
from tril.model.checkpoint import build as build_from_config
from tril.model.config import MAX_POSITION_ELEMENTS
from tril.model.gpt import GPT, GPTConfig
from tril.model.initialization import SkipInit

__all__ = ["MAX_POSITION_ELEMENTS", "PREFIX", "SkipInit", "build"]


def build(values: dict[str, Any], state: dict[str, Tensor], device: torch.device | str) -> GPT:
    return build_from_config(GPTConfig(**values), {k.removeprefix(PREFIX): x for k, x in state.items()}, device)
