"""The public API of the model, imported on first use: `from tril.model import GPT, MultiHeadAttention, load`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tril.model.attention import MultiHeadAttention, attention, attention_weights, causal_mask
    from tril.model.checkpoint import load
    from tril.model.config import GPTConfig
    from tril.model.gpt import GPT

__all__ = ["GPT", "GPTConfig", "MultiHeadAttention", "attention", "attention_weights", "causal_mask", "load"]

_MODULES = {
    "GPT": "gpt",
    "GPTConfig": "config",
    "MultiHeadAttention": "attention",
    "attention": "attention",
    "attention_weights": "attention",
    "causal_mask": "masks",
    "load": "checkpoint",
}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return module if name == _MODULES[name] else getattr(module, name)  # the module `attention` can be called
