"""One step of decoding in a form that can be compiled and recorded as a CUDA graph: no shape and no Python number changes between steps.

B batch, H heads, L layers, S capacity of the cache, V vocabulary.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from model.gpt import GPT
from model.kv_cache import KVCache
from model.masks import visible_from_positions

MOST_FORMS = 64  # compiled in one process; torch's own limit of 8 is there to find what recompiles by mistake

def decode_step(
    model: GPT, cache: KVCache, ids: Tensor, position: Tensor, shift: Tensor | None = None, head_gate: Tensor | None = None
) -> Tensor:
    """The newest token of each row, ids (B, 1), at column `position` (1,) of the cache -> logits (B, V) of the next.

    shift      how many columns at the left are padding, (B, 1); None: none in any row
    head_gate  as in `GPT.forward`
    """
    columns = torch.arange(cache.capacity, device=ids.device)
    visible = visible_from_positions(position, columns, model.config.window)[None]  # (1, S)
    if shift is not None:
        visible = visible & (columns >= shift)  # (B, S)
    positions = position if shift is None else position - shift  # (1,) or (B, 1)
    hidden = model.hidden(ids, cache=cache.at(position), mask=visible[:, None, None], positions=positions, head_gate=head_gate)
    return model.logits(hidden)[:, 0]


@functools.cache
def compiled_step(device_type: str) -> Callable[..., Tensor]:
    """`decode_step`, compiled for each model and batch that it meets. On a GPU each becomes a CUDA graph, since starting its kernels one by
    one would take longer than they run."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_FORMS)
    mode = "reduce-overhead" if device_type == "cuda" else "default"
    return torch.compile(decode_step, mode=mode, fullgraph=True, dynamic=False)


def keep_address(cache: KVCache) -> None:
    """A CUDA graph then writes into this cache itself; else it would write into a copy."""
    for tensor in (*cache.keys, *cache.values):
        torch._dynamo.mark_static_address(tensor, guard=False)
