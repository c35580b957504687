"""What attention weights should be: the formula in float64, which shares no code with the model.

B batch, T queries, S keys, H heads, G key/value heads, D head size.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Rounding steps of a score: projection, norm, gain and rotation, each of q and of k, the product and its sum.
ROUNDINGS_PER_SCORE = 10
ROUNDINGS_PER_BIAS = 2  # half a step each: slope, product with the distance, sum with the score


@dataclass(frozen=True)
class ScoreFormula:
    """How the scores of a layer follow from its projected queries and keys.

    Attributes:
        norm: of each head's q and k: "rmsnorm", "layernorm" or "none".
        norm_eps: added to the mean square or the variance; None: torch's default.
        rope_base: theta of rotary positions; None: no rotation.
        bias: added to the scaled scores, broadcastable to (H, T, S); -inf masks a key. None: no bias.
    """

    norm: str = "none"
    norm_eps: float | None = None
    rope_base: float | None = None
    bias: Tensor | None = None


def expected_weights(
    q: Tensor, k: Tensor, gains: tuple[Tensor | None, Tensor | None], visible: Tensor, rule: ScoreFormula, eps: float
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D) + bias) over the visible keys, in float64. A row without a visible key is 0.

    The rounding error of a score is at most `ROUNDINGS_PER_SCORE` * eps * sum |q_d k_d| / sqrt(D), and that of the
    bias. A layernorm adds what cancels in x - mean to |q_d| and |k_d|. The error changes a weight by at most a factor
    of e^(2 * error).

    Args:
        q, k: the outputs of the projections, (B, H, T, D) and (B, G, S, D), on a device that has float64.
        gains: of the norms of q and of k, (D,) each.
        visible: bool, broadcastable to (H, T, S).
        eps: relative rounding step of the factors in a product.

    Returns:
        The weights and the rounding error of each, (B, H, T, S).
    """
    step = torch.finfo(q.dtype).eps
    (q, q_size), (k, k_size) = (_normalized_and_rotated(x, g, rule) for x, g in zip((q, k), gains, strict=True))
    k, k_size = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, k_size))  # (B, H, S, D)
    scale, visible = 1 / math.sqrt(q.shape[-1]), visible.to(q.device)
    scores, error = q @ k.mT * scale, q_size @ k_size.mT * (scale * ROUNDINGS_PER_SCORE * eps)  # (B, H, T, S)
    if rule.bias is not None:
        bias = rule.bias.to(q.device).double()
        scores, error = scores + bias, error + bias.abs() * (ROUNDINGS_PER_BIAS * step)
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    largest = error.masked_fill(~visible, 0.0).amax(-1, keepdim=True)  # (B, H, T, 1)
    return weights, weights * torch.expm1(2 * largest) + eps


def expected_alibi(n_heads: int, n_queries: int, n_keys: int) -> Tensor:
    """The bias of ALiBi (Press et al. 2022), float64 (H, T, S): a slope of each head times minus the distance.

    For a power of 2, the slope of head h = 1 ... H is 2^(-8 h / H). For another number, let P be the power of 2 below:
    the first P heads have the slopes of P heads, and the others the 1st, 3rd, 5th ... of 2 P heads.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    eighths = [h / power for h in range(1, power + 1)] + [(2 * h + 1) / (2 * power) for h in range(n_heads - power)]
    rows = [[-abs(n_keys - n_queries + i - j) for j in range(n_keys)] for i in range(n_queries)]
    slopes = torch.tensor([0.5 ** (8 * e) for e in eighths], dtype=torch.float64)
    return torch.einsum("h,ts->hts", slopes, torch.tensor(rows, dtype=torch.float64).view(n_queries, n_keys))


def _normalized_and_rotated(x: Tensor, gain: Tensor | None, rule: ScoreFormula) -> tuple[Tensor, Tensor]:
    """In float64, with the size that its rounding errors are relative to, (B, n, T, D) each."""
    default = {"none": 0.0, "rmsnorm": torch.finfo(x.dtype).eps, "layernorm": 1e-5}[rule.norm]
    eps, x = default if rule.norm_eps is None else rule.norm_eps, x.double()
    canceled = torch.zeros_like(x)
    if rule.norm != "none":
        assert gain is not None, f"{rule.norm} without a gain"
        mean = x.mean(-1, keepdim=True) if rule.norm == "layernorm" else x.new_zeros(())
        factor = gain.to(x.device).double() / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()
        x, canceled = (x - mean) * factor, mean.abs() * factor.abs()
    if rule.rope_base is None:
        return x, x.abs() + canceled
    pair = torch.complex(*canceled.chunk(2, -1)).abs()
    x = _rotated(x, rule.rope_base)
    return x, x.abs() + torch.cat((pair, pair), dim=-1)


def _rotated(x: Tensor, base: float) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, turned by position * base^(-2i/D)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    positions = torch.arange(x.shape[2], device=x.device)[:, None]
    rotation = torch.polar(torch.ones_like(frequency), frequency) ** positions  # e^(i p f), (T, D/2)
    rotated = torch.complex(x[..., :half], x[..., half:]) * rotation
    return torch.cat((rotated.real, rotated.imag), dim=-1)
