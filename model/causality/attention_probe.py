"""The attention weights that a backend really uses, and the formula that they should follow.

With rows of the identity matrix as values, attention returns its weights: a value of 1 at key s and 0 elsewhere comes
out as the weight of key s. This works for every backend and cache, without a second implementation that could be right
where the first one is wrong.

B batch, T queries, S keys, H heads, G key/value heads, D head size.
"""

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tril.model.attention import MultiHeadAttention
from tril.model.causality.receptive_field import removed_at_exit
from tril.model.causality.subject import float64_device
from tril.model.rope import BASE

# Rounding steps of a score: projection, norm, gain and rotation, each of q and of k, the product and its sum.
ROUNDINGS_PER_SCORE = 10
TF32_EPS = 2.0**-10  # TF32 has 10 bits of mantissa


class StopForward(Exception):
    """Raised by a hook that has collected everything, so that the layers above are not computed."""


@torch.no_grad()
def used_weights(attn: MultiHeadAttention, run: Callable[[], object], n_keys: int) -> Tensor:
    """The weights that `attn` applies to the values while `run()` runs the model over `n_keys` positions.

    Args:
        run: one forward pass, or several with a cache.

    Returns:
        (B, H, T, S).
    """
    parts = []
    for first in range(0, n_keys, attn.head_dim):
        outputs, position = [], 0

        def replace_values(module, args, out, first=first):  # (B, T, G*D)
            nonlocal position
            keys = torch.arange(position, position + out.shape[1], device=out.device)
            position += out.shape[1]
            one_hot = keys[:, None] == torch.arange(first, first + attn.head_dim, device=out.device)  # (T, D)
            return one_hot.type_as(out).repeat(1, attn.n_kv_heads).expand_as(out)

        def collect(module, args, outputs=outputs):
            outputs.append(args[0])
            if args[0].shape[1] == n_keys:
                raise StopForward

        _run(run, [attn.v_proj.register_forward_hook(replace_values), attn.o_proj.register_forward_pre_hook(collect)])
        parts.append(torch.cat(outputs, dim=1).unflatten(-1, (attn.n_heads, attn.head_dim)))  # (B, T, H, D)
    return torch.cat(parts, dim=-1)[..., :n_keys].transpose(1, 2)


@torch.no_grad()
def formula(
    attn: MultiHeadAttention, run: Callable[[], object], visible: Tensor, *, rope: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) in float64, from the projections of the run itself.

    The rounding error of a score is at most `ROUNDINGS_PER_SCORE` * eps * sum |q_d k_d| / sqrt(D). It changes a weight
    by at most a factor of e^(2 * error).

    Args:
        run: one forward pass over all positions.
        visible: bool (T, S).
        rope: whether queries and keys are rotated.

    Returns:
        The weights and the rounding error of each, (B, H, T, S), on a device that has float64.
    """
    outputs = {"q": [], "k": []}

    def collect(module, args, out):
        outputs["q" if module is attn.q_proj else "k"].append(out)
        if module is attn.k_proj and out.shape[1] == len(visible):  # k is computed after q
            raise StopForward

    _run(run, [projection.register_forward_hook(collect) for projection in (attn.q_proj, attn.k_proj)])
    eps = eps_of_products(outputs["q"][0])
    q, k = (torch.cat(x, 1).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for x in outputs.values())
    q, k = _normalize_and_rotate(q, attn.q_norm, rope), _normalize_and_rotate(k, attn.k_norm, rope)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scale, masked = 1 / math.sqrt(attn.head_dim), ~visible.to(q.device)
    weights = (q @ k.mT * scale).masked_fill(masked, -math.inf).softmax(-1)
    largest = (q.abs() @ k.abs().mT * scale).masked_fill(masked, 0).amax(-1, keepdim=True)  # (B, H, T, 1)
    return weights, weights * torch.expm1(2 * ROUNDINGS_PER_SCORE * eps * largest) + eps


def eps_of_products(x: Tensor) -> float:
    """The relative rounding step of the factors in a matrix product of tensors such as x."""
    in_tf32 = x.device.type == "cuda" and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return TF32_EPS if in_tf32 and torch.cuda.is_tf32_supported() else torch.finfo(x.dtype).eps


def _run(run: Callable[[], object], hooks: Sequence) -> None:
    with removed_at_exit(hooks), contextlib.suppress(StopForward):
        run()


def _normalize_and_rotate(x: Tensor, norm: torch.nn.Module, rope: bool) -> Tensor:
    """RMS norm and rotary positions in float64, independent of the model's code: (B, n, T, D)."""
    eps, x = torch.finfo(x.dtype).eps, x.to(float64_device(x.device)).double()
    gain = getattr(norm, "weight", None)
    if gain is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.to(x.device).double()
    if not rope:
        return x
    half = x.shape[-1] // 2
    frequency = BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    positions = torch.arange(x.shape[2], device=x.device)[:, None]
    rotation = torch.polar(torch.ones_like(frequency), frequency) ** positions  # e^(i p f), (T, D/2)
    rotated = torch.complex(x[..., :half], x[..., half:]) * rotation
    return torch.cat((rotated.real, rotated.imag), dim=-1)
