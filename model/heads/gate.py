"""The names of the heads of a model, and the gate that removes some of them.

Letters: L layers, H heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tril.model.config import GPTConfig

Head = tuple[int, int]  # layer, head


def head_name(head: Head) -> str:
    return "L{}H{}".format(*head)


def all_heads(config: GPTConfig) -> list[Head]:
    return [(layer, head) for layer in range(config.n_layers) for head in range(config.n_heads)]


def head_gate(config: GPTConfig, names: Sequence[str]) -> Tensor:
    """The gate that removes the named heads ("L0H3": layer 0, head 3): (L, H) float32, 0 for those and 1 for others.

    Raises:
        ValueError: the model has no such head.
    """
    if config.n_heads == 0:
        raise ValueError("model.n_heads=0: a model without attention has no heads to remove")
    heads = {head_name(head): head for head in all_heads(config)}
    unknown = [name for name in names if name not in heads]
    if unknown:
        valid = f"L0H0 to {head_name((config.n_layers - 1, config.n_heads - 1))}"
        shape = f"{config.n_layers} layers of {config.n_heads} heads"
        raise ValueError(f"the model has no head {', '.join(map(repr, unknown))}; with {shape}, use {valid}")
    gate = torch.ones(config.n_layers, config.n_heads)
    for name in names:
        gate[heads[name]] = 0
    return gate
