"""The attention weights that a backend really used, and the formula that they should follow.

A value of 1 in the place of key s and 0 elsewhere comes out of attention as the weight of key s. So with rows of the identity in the place
of the values, any backend, with any cache, tells its weights, without a second implementation that might be right where the first is wrong.

B batch, T queries, S keys, H heads, G key/value heads, D head size.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tril.model.attention import MultiHeadAttention
from tril.model.causality.subject import float64_device
from tril.model.rope import BASE

# Roundings that a score collects: projection, norm, gain and rotation, each of q and of k, the product and its sum.
ROUNDINGS_OF_A_SCORE = 10
TF32_EPS = 2.0**-10  # of TF32's 10 bits of mantissa


class Enough(Exception):
    """What was to be seen of a run has been seen: the layers above need not be computed."""


@torch.no_grad()
def used_weights(attn: MultiHeadAttention, run: Callable[[], object], n_keys: int) -> Tensor:
    """(B, H, T, S): what `attn` weighs the values with while `run()` runs the model over `n_keys` positions, at once or in chunks."""
    parts = []
    for first in range(0, n_keys, attn.head_dim):
        outputs, position = [], 0

        def identity(module, args, out, first=first):  # (B, T, G*D)
            nonlocal position
            keys = torch.arange(position, position + out.shape[1], device=out.device)
            position += out.shape[1]
            one = keys[:, None] == torch.arange(first, first + attn.head_dim, device=out.device)  # (T, D)
            return one.type_as(out).repeat(1, attn.n_kv_heads).expand_as(out)

        def collect(module, args, outputs=outputs):
            outputs.append(args[0])
            if args[0].shape[1] == n_keys:
                raise Enough

        hooks = [attn.v_proj.register_forward_hook(identity), attn.o_proj.register_forward_pre_hook(collect)]
        _run(run, hooks)
        parts.append(torch.cat(outputs, dim=1).unflatten(-1, (attn.n_heads, attn.head_dim)))  # (B, T, H, D)
    return torch.cat(parts, dim=-1)[..., :n_keys].transpose(1, 2)


@torch.no_grad()
def formula(
    attn: MultiHeadAttention, run: Callable[[], object], visible: Tensor, *, rope: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) over the `visible` (T, S) keys in float64, (B, H, T, S), from the projections of the very run; and the
    error that rounding may put into each weight, of the same shape. Both lie where there is float64.

    A score's rounding error is at most its roundings times eps times sum |q_d k_d| / sqrt(D); a weight changes by a factor e^(2 * that).
    """
    seen = {"q": [], "k": []}

    def collect(module, args, out):
        seen["q" if module is attn.q_proj else "k"].append(out)
        if module is attn.k_proj and out.shape[1] == len(visible):  # which comes after q
            raise Enough

    _run(run, [projection.register_forward_hook(collect) for projection in (attn.q_proj, attn.k_proj)])
    eps = eps_of_products(seen["q"][0])
    q, k = (
        torch.cat(seen[name], 1).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for name in seen
    )  # (B, H or G, T, D)
    q, k = _ready(q, attn.q_norm, rope), _ready(k, attn.k_norm, rope)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # (B, H, S, D)
    scale, hidden = 1 / math.sqrt(attn.head_dim), ~visible.to(q.device)
    weights = (q @ k.mT * scale).masked_fill(hidden, -math.inf).softmax(-1)
    error = ROUNDINGS_OF_A_SCORE * eps * (q.abs() @ k.abs().mT * scale).masked_fill(hidden, 0).amax(-1, keepdim=True)
    return weights, weights * torch.expm1(2 * error) + eps


def eps_of_products(x: Tensor) -> float:
    """The relative step between the numbers that matrices such as x are rounded to in a product."""
    in_tf32 = x.device.type == "cuda" and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return TF32_EPS if in_tf32 and torch.cuda.is_tf32_supported() else torch.finfo(x.dtype).eps


def _run(run: Callable[[], object], hooks: list) -> None:
    """Until `Enough`, then without the hooks."""
    try:
        run()
    except Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()


def _ready(x: Tensor, norm: torch.nn.Module, rope: bool) -> Tensor:
    """Normalised and rotated by hand, in float64: (B, n, T, D)."""
    eps, x = torch.finfo(x.dtype).eps, x.to(float64_device(x.device)).double()
    if getattr(norm, "weight", None) is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight.to(x.device).double()
    if not rope:
        return x
    half = x.shape[-1] // 2
    frequency = BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    turn = (
        torch.polar(torch.ones_like(frequency), frequency) ** torch.arange(x.shape[2], device=x.device)[:, None]
    )  # e^(i p f)
    rotated = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((rotated.real, rotated.imag), dim=-1)
