"""The position-wise feed-forward network (FFN)."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn


def relu2(x: Tensor) -> Tensor:
    """So et al. 2021."""
    return x.relu().square()


# swiglu (Shazeer 2020) multiplies the activation of a gate with the hidden layer.
ACTIVATIONS = {
    "relu": F.relu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
    "relu2": relu2,
    "swiglu": F.silu,
}


class MLP(nn.Module):
    """up, activation, down, residual dropout: (B, T, C) -> (B, T, C).

    Args:
        dim: model width C.
        hidden: hidden width.
        kind: a key of ACTIVATIONS.
        bias: biases in all matrices.
        dropout: on the output, in training mode.
    """

    def __init__(self, dim: int, hidden: int, *, kind: str, bias: bool, dropout: float):
        super().__init__()
        self.activation = ACTIVATIONS[kind]
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.gate = nn.Linear(dim, hidden, bias=bias) if kind == "swiglu" else None
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # (B, T, hidden)
        h = self.activation(h) if self.gate is None else self.activation(self.gate(x)) * h
        return self.dropout(self.down(h))  # (B, T, C)
