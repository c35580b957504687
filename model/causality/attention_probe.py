"""The attention weights that a backend really uses, and the queries and keys that the formula starts from.

With rows of the identity matrix as values, attention returns its weights: a value of 1 at key s and 0 elsewhere comes
out as the weight of key s. This works for every backend and cache, without a second implementation that could be right
where the first one is wrong.

B batch, T queries, S keys, H heads, G key/value heads, D head size, D_v size of a value.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tril.model.attention import MultiHeadAttention
from tril.model.causality.attention_formula import expected_weights
from tril.model.causality.receptive_field import removed_at_exit
from tril.model.causality.subject import ProbedLayer, float64_device

TF32_EPS = 2.0**-10  # TF32 has 10 bits of mantissa
GROUP_FACTORS = 16  # values are multiplied by 2^(g mod 16), which is exact and which float16 can hold


class StopForward(Exception):
    """Raised by a hook that has collected everything, so that the layers above are not computed."""


@torch.no_grad()
def used_weights(
    attn: MultiHeadAttention, run: Callable[[], object], n_keys: int, n_queries: int | None = None
) -> Tensor:
    """The weights that `attn` applies to the values while `run()` runs the model.

    The values of each key/value head have a factor of their own, so that a head which reads those of another group
    shows wrong weights.

    Args:
        run: one forward pass, or several with a cache. Cross-attention projects all keys in each of them.
        n_keys, n_queries: of all passes together; None: as many queries as keys.

    Returns:
        (B, H, T, S).
    """
    n_queries, size = n_keys if n_queries is None else n_queries, attn.v_head_dim
    factors = 2.0 ** (torch.arange(attn.n_kv_heads) % GROUP_FACTORS)  # (G,)
    of_heads = factors.repeat_interleave(attn.n_heads // attn.n_kv_heads)  # (H,)
    parts = []
    for first in range(0, n_keys, size):
        outputs, position = [], 0

        def replace_values(module, args, out, first=first):  # (B, S, G * D_v)
            nonlocal position
            keys = torch.arange(position, position + out.shape[1], device=out.device) % n_keys
            position += out.shape[1]
            one_hot = keys[:, None] == torch.arange(first, first + size, device=out.device)  # (S, D_v)
            return torch.kron(factors.to(out), one_hot.type_as(out)).expand_as(out)

        def collect(module, args, outputs=outputs):
            outputs.append(args[0])
            if sum(out.shape[1] for out in outputs) == n_queries:
                raise StopForward

        _run(run, [attn.v_proj.register_forward_hook(replace_values), attn.o_proj.register_forward_pre_hook(collect)])
        out = torch.cat(outputs, dim=1).unflatten(-1, (attn.n_heads, size))  # (B, T, H, D_v)
        parts.append(out / of_heads.to(out)[:, None])
    return torch.cat(parts, dim=-1)[..., :n_keys].transpose(1, 2)


@torch.no_grad()
def formula(layer: ProbedLayer, run: Callable[[], object]) -> tuple[Tensor, Tensor]:
    """The weights that `layer` should have, from the projections of the run itself.

    Args:
        run: one forward pass over all positions, or several with a cache.

    Returns:
        The weights and the rounding error of each, (B, H, T, S), on a device that has float64.
    """
    attn, (n_queries, n_keys) = layer.module, layer.visible.shape[-2:]
    outputs = {"q": [], "k": []}

    def collect(module, args, out):
        outputs["q" if module is attn.q_proj else "k"].append(out)
        if module is attn.k_proj and sum(q.shape[1] for q in outputs["q"]) == n_queries:  # k is computed after q
            raise StopForward

    _run(run, [projection.register_forward_hook(collect) for projection in (attn.q_proj, attn.k_proj)])
    eps = eps_of_products(outputs["q"][0])
    q, k = (torch.cat(x, 1).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for x in outputs.values())
    k = k[:, :, :n_keys]  # cross-attention in chunks of queries repeats the keys
    q, k = (x.to(float64_device(x.device)) for x in (q, k))
    gains = getattr(attn.q_norm, "weight", None), getattr(attn.k_norm, "weight", None)
    return expected_weights(q, k, gains, layer.visible, layer.formula, eps)


def eps_of_products(x: Tensor) -> float:
    """The relative rounding step of the factors in a matrix product of tensors such as x."""
    in_tf32 = x.device.type == "cuda" and x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return TF32_EPS if in_tf32 and torch.cuda.is_tf32_supported() else torch.finfo(x.dtype).eps


def _run(run: Callable[[], object], hooks: Sequence) -> None:
    with removed_at_exit(hooks), contextlib.suppress(StopForward):
        run()
