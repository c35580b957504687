"""The public API of the model, imported on first use: `from tril.model import GPT, MultiHeadAttention, load`.

The function `attention` has the name of its module: `from tril.model.attention import attention`.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tril.model.attention import MultiHeadAttention, attention_weights
    from tril.model.config import GPTConfig
    from tril.model.gpt import GPT
    from tril.model.masks import causal_mask
    from tril.model.runs import load

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "attention_weights", "causal_mask", "load"]

_MODULES = {
    "GPT": "gpt",
    "GPTConfig": "config",
    "MultiHeadAttention": "attention",
    "attention_weights": "attention",
    "causal_mask": "masks",
    "load": "runs",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
