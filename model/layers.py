"""Normalization and the position-wise feed-forward network (FFN). A kind of either is a row of NORMS or ACTIVATIONS.

B batch, T tokens, C width.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tril.model.config import GATED

LAYERNORM_EPS = 1e-5  # torch's default


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467), in the dtype of x.

    Under autocast x may be bf16 while the weight is float32, for which `nn.RMSNorm` takes a slower path.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` (Ba et al. 2016, arXiv:1607.06450) in the dtype of x: under autocast torch returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).type_as(x)


NORMS = {  # size, eps or None, bias -> module
    "rmsnorm": lambda size, eps, bias: RMSNorm(size, eps=eps),
    "layernorm": lambda size, eps, bias: LayerNorm(size, eps=LAYERNORM_EPS if eps is None else eps, bias=bias),
    "none": lambda size, eps, bias: nn.Identity(),
}


def make_norm(kind: str | bool, size: int, *, eps: float | None = None, bias: bool = False) -> nn.Module:
    """The normalization layer of a kind in NORMS, over the last dimension of `size`.

    Args:
        kind: True and False mean "rmsnorm" and "none".
        eps: added to the mean square or the variance. None: torch's default, which is the machine epsilon for rmsnorm
            and LAYERNORM_EPS for layernorm.
        bias: of layernorm.

    Raises:
        ValueError: an unknown kind.
    """
    kind = ("rmsnorm" if kind else "none") if isinstance(kind, bool) else kind
    if kind not in NORMS:
        raise ValueError(f"normalization {kind!r} must be one of {', '.join(NORMS)}, or True (rmsnorm) or False (none)")
    return NORMS[kind](size, eps, bias)


class _Relu2(torch.autograd.Function):
    """Keeps relu(x): the backward pass then takes two passes over memory, and not four. Equal bit for bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = x.relu()
        ctx.save_for_backward(positive)
        return positive.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad * ctx.saved_tensors[0]).mul_(2)


def relu2(x: Tensor) -> Tensor:
    """relu(x)^2 (So et al. 2021, arXiv:2109.08668)."""
    return x.relu().square() if torch.compiler.is_compiling() else _Relu2.apply(x)  # the compiler fuses the passes


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": partial(F.gelu, approximate="tanh"),  # as in GPT-2
    "gelu_erf": F.gelu,  # exact, as in nanoGPT
    "relu2": relu2,
    "swiglu": F.silu,  # Shazeer 2020; GATED: of a gate, which is multiplied with the hidden layer
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
        self.gate = nn.Linear(dim, hidden, bias=bias) if kind in GATED else None
        self.down = nn.Linear(hidden, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)  # (B, T, hidden)
        h = self.activation(h) if self.gate is None else self.activation(self.gate(x)) * h
        return self.dropout(self.down(h))  # (B, T, C)
