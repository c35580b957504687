"""The attention weights that a backend uses: with rows of the identity matrix as values, it returns its weights."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor

from tril.model.attention import MultiHeadAttention
from tril.model.causality.place import removed_at_exit

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


def _run(run: Callable[[], object], hooks: list) -> None:
    with removed_at_exit(hooks), contextlib.suppress(StopForward):
        run()
