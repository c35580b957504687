"""One step of decoding in a form that can be compiled and recorded as a CUDA graph: no shape and no Python number changes between steps.

B batch, H heads, L layers, S capacity of the cache, V vocabulary.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tril.model.backends import raise_recompile_limit
from tril.model.generation.sampling import Choice, choose
from tril.model.gpt import GPT
from tril.model.kv_cache import KVCache
from tril.model.masks import visible_from_positions

HOW = {
    "cuda": {"mode": "reduce-overhead"},
    # One C++ function for all kernels; products of a single row as loops, for which a library would be called in vain.
    "cpu": {"options": {"cpp_wrapper": True, "post_grad_fusion_options": {"decompose_mm_pass": {}}}},
}


def decode_step(
    model: GPT,
    cache: KVCache,
    ids: Tensor,
    position: Tensor,
    shift: Tensor | None = None,
    head_gate: Tensor | None = None,
    choice: Choice | None = None,
) -> Tensor:
    """The newest token of each row, ids (B, 1), at column `position` (1,) of the cache -> the next of each, (B,).

    shift      how many columns at the left are padding, (B, 1); None: none in any row
    head_gate  as in `GPT.forward`
    choice     see `model.sampling.choose`; None: the logits (B, V) are returned instead
    """
    columns = torch.arange(cache.capacity, device=ids.device)
    visible = visible_from_positions(position, columns, model.config.window)[None]  # (1, S)
    if shift is not None:
        visible = visible & (columns >= shift)  # (B, S)
    positions = position if shift is None else position - shift  # (1,) or (B, 1)
    hidden = model.hidden(
        ids, cache=cache.at(position), mask=visible[:, None, None], positions=positions, head_gate=head_gate
    )
    logits = model.logits(hidden)[:, 0]  # (B, V)
    return logits if choice is None else choose(logits, choice)


@functools.cache
def compiled_step(device_type: str) -> Callable[..., Tensor]:
    """`decode_step`, compiled for each model, batch and way to choose that it meets. On a GPU each becomes a CUDA graph, since starting its
    kernels one by one would take longer than they run; on a CPU a C++ function, since Python would take as long to call them."""
    raise_recompile_limit()
    return torch.compile(decode_step, **HOW.get(device_type, {}), fullgraph=True, dynamic=False)


def skip_guard_eval() -> AbstractContextManager:
    """For a call of `compiled_step` in the form of the call before: the same model and way to choose, and inputs of the same shapes and
    dtypes. torch then does not go through all weights to see whether that is so, and only tells apart the forms that it has compiled
    (https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html, skip_guard_eval_unsafe)."""
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


def keep_address(cache: KVCache) -> None:
    """A CUDA graph then writes into this cache itself; else it would write into a copy."""
    for tensor in (*cache.keys, *cache.values):
        torch._dynamo.mark_static_address(tensor, guard=False)
