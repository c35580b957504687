"""One decoding step that torch.compile and CUDA graphs can take: no shape and no Python number changes between steps.

B batch, H heads, L layers, S capacity of the cache, V vocabulary.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from tril.model.compilation import raise_recompile_limit
from tril.model.generation.sampling import Choice, choose
from tril.model.gpt import GPT
from tril.model.kv_cache import KVCache

COMPILE_OPTIONS = {
    "cuda": {"mode": "reduce-overhead"},
    # One C++ function for all kernels; matrix-vector products as generated loops instead of library calls.
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
    """Processes the last token of each row and chooses the next one.

    Args:
        ids: the last token of each row, (B, 1).
        position: its column in the cache, (1,).
        shift: number of left-padding tokens of each row, (B, 1); None: no row has any.
        head_gate: as in `GPT.forward`.
        choice: see `tril.model.generation.sampling.choose`; None: return the logits.

    Returns:
        The next token of each row (B,), or the logits (B, V).
    """
    mask = None
    if shift is not None:
        mask = (torch.arange(cache.capacity, device=ids.device) >= shift)[:, None, None]  # (B, 1, 1, S)
    positions = position if shift is None else position - shift  # (1,) or (B, 1)
    hidden = model.hidden(
        ids, cache=cache, cache_position=position, mask=mask, positions=positions, head_gate=head_gate
    )
    logits = model.logits(hidden)[:, 0]  # (B, V)
    return logits if choice is None else choose(logits, choice)


@functools.cache
def compiled_step(device_type: str) -> Callable[..., Tensor]:
    """`decode_step`, compiled once per model, batch size and kind of choice.

    On a GPU each version becomes a CUDA graph, because launching the kernels one by one would take longer than they
    run; on a CPU it becomes one C++ function, because calling them from Python would take as long.
    """
    raise_recompile_limit()
    return torch.compile(decode_step, **COMPILE_OPTIONS.get(device_type, {}), fullgraph=True, dynamic=False)


def skip_guard_eval() -> AbstractContextManager:
    """For a call of `compiled_step` with the model, kind of choice, shapes and dtypes of the call before.

    torch then does not check every weight against its guards
    (https://docs.pytorch.org/docs/stable/generated/torch.compiler.set_stance.html, skip_guard_eval_unsafe).
    """
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True)


def mark_static(cache: KVCache) -> None:
    """Lets a CUDA graph write into this cache itself instead of into a copy."""
    for tensor in (*cache.keys, *cache.values):
        torch._dynamo.mark_static_address(tensor, guard=False)
