"""Normalization layers."""

import torch.nn.functional as F
from torch import Tensor, nn

NORMS = ("rmsnorm", "layernorm", "none")
LAYERNORM_EPS = 1e-5  # torch's default


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467), in the dtype of x.

    Under autocast x may be bf16 while the weight is float32; `nn.RMSNorm` then returns float32 and takes a slower path.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.type_as(x), self.eps)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` (Ba et al. 2016, arXiv:1607.06450) in the dtype of x: under autocast torch returns float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).type_as(x)


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
    kind = norm_kind(kind)
    if kind not in NORMS:
        raise ValueError(f"normalization {kind!r} must be one of {', '.join(NORMS)}, or True (rmsnorm) or False (none)")
    if kind == "none":
        return nn.Identity()
    if kind == "rmsnorm":
        return RMSNorm(size, eps=eps)
    return LayerNorm(size, eps=LAYERNORM_EPS if eps is None else eps, bias=bias)


def norm_kind(kind: str | bool) -> str:
    """ "rmsnorm" for True and "none" for False, which configs of earlier versions contain; other values unchanged."""
    return {True: "rmsnorm", False: "none"}[kind] if isinstance(kind, bool) else kind
