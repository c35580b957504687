"""The catalogue of mutants: defects patched into the real modules, which the certificate must catch.

B batch, T queries, S keys, H query heads, C width, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import NANO_PARTS
from tril.model import attention, backends, masks
from tril.model.config import GPTConfig
from tril.model.gpt import Block

Patch = pytest.MonkeyPatch
SHAPE = {"vocab_size": 31, "context_length": 40, "n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2}
TINY = SHAPE | NANO_PARTS | {"backend": "explicit"}
# Shared by the mutants that rotary positions or a shorter context would hide.
LEARNED = {"pos": "learned", "context_length": 64}


@dataclass(frozen=True)
class Mutant:
    """A defect: `apply` patches it in; `config` and `precision` are those of the model that shows it."""

    apply: Callable[[Patch], None]
    config: GPTConfig
    precision: str


CATALOGUE: dict[str, Mutant] = {}


def mutant(precision: str = "32-true", **choices):
    """Adds a function to the catalogue; `choices` are the settings of its GPTConfig that differ from TINY."""

    def add(apply):
        CATALOGUE[apply.__name__] = Mutant(apply, GPTConfig(**TINY | choices), precision)
        return apply

    return add


def rule(patch: Patch, visible: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Builds causal masks by another rule than the definition, without a window."""

    def causal_mask(n_queries, n_keys, *, window=None, start=None, device=None):
        query = torch.arange(n_queries)[:, None] + (n_keys - n_queries if start is None else start)
        return visible(query, torch.arange(n_keys))  # (T, S)

    for module in (masks, attention, backends):
        patch.setattr(module, "causal_mask", causal_mask)


def kernel(patch: Patch, changed: Callable, name: str = "explicit") -> None:
    """Replaces a backend by changed(original, q, k, v, masking, dropout_p), which returns what a backend does."""
    original = attention.BACKENDS[name]
    patch.setitem(attention.BACKENDS, name, lambda *arguments: changed(original, *arguments))


def causal_if(patch: Patch, condition: Callable[[Tensor, Tensor, float], bool]) -> None:
    """Drops the causal mask unless condition(q, k, dropout_p)."""

    def changed(original, q, k, v, masking, dropout_p):
        causal = masking.causal and condition(q, k, dropout_p)
        return original(q, k, v, masking._replace(causal=causal), dropout_p)

    kernel(patch, changed)


def softmax(patch: Patch, weights: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Replaces the masked softmax by weights(q k^T (B, H, T, S), visible, sqrt(D)), for models without bias."""

    def changed(q, k, v, masking, dropout_p):
        mask, bias, causal, window = masking
        assert bias is None
        k, v = attention.repeat_heads(k, q), attention.repeat_heads(v, q)  # (B, H, S, D)
        products = q @ k.mT  # (B, H, T, S)
        if causal:
            mask = masks.causal_mask(q.shape[2], k.shape[2], window=window)
        visible = torch.ones((), dtype=torch.bool) if mask is None else mask
        new = F.dropout(weights(products, visible.expand_as(products), math.sqrt(q.shape[-1])), dropout_p)
        return new.to(v.dtype) @ v, new

    patch.setattr(attention, "explicit", changed)
    patch.setitem(attention.BACKENDS, "explicit", changed)


def masked(scores: Tensor, visible: Tensor, value: float = -math.inf) -> Tensor:
    return scores.masked_fill(~visible, value)


def stream(patch: Patch, changed: Callable[[Tensor], Tensor], layer: type = Block) -> None:
    """Passes the output of every layer of this type through `changed`."""
    original = layer.forward
    patch.setattr(layer, "forward", lambda self, *rest, **options: changed(original(self, *rest, **options)))


def next_token(x: Tensor) -> Tensor:
    """(B, T, C) shifted left by one position, with zeros at the last one."""
    return F.pad(x[:, 1:], (0, 0, 0, 1))
