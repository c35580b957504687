"""One decoding step: with any shapes, and as torch.compile and CUDA graphs take it, without anything that changes.

B batch, T queries, H heads, L layers, S capacity of the cache, V vocabulary.
"""

import functools
from collections.abc import Callable

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


def next_tokens(
    model: GPT,
    ids: Tensor,
    columns: Tensor,
    n_keys: int,
    shift: Tensor | None = None,
    choice: Choice | None = None,
    **options,
) -> Tensor:
    """The tokens (B,) that follow ids (B, T); without a choice, the logits (B, V).

    Args:
        columns: of the ids among the keys, (T,).
        n_keys: S, those of earlier tokens included.
        shift: number of left-padding tokens of each row, (B, 1), which no query sees; None: no row has any.
        **options: of `GPT.hidden`.
    """
    mask, positions = None, columns
    if shift is not None:
        mask = (torch.arange(n_keys, device=ids.device) >= shift)[:, None, None]  # (B, 1, 1, S)
        positions = (columns - shift).clamp(min=0)  # (B, T)
    logits = model.logits(model.hidden(ids, mask=mask, positions=positions, **options))[:, -1]  # (B, V)
    return logits if choice is None else choose(logits, choice)


def decode_step(
    model: GPT,
    cache: KVCache,
    ids: Tensor,
    position: Tensor,
    shift: Tensor | None = None,
    head_gate: Tensor | None = None,
    choice: Choice | None = None,
) -> Tensor:
    """`next_tokens` after ids (B, 1) at `position` (1,) of the cache, where only values of tensors change."""
    options = {"cache": cache, "cache_position": position, "head_gate": head_gate}
    return next_tokens(model, ids, position, cache.capacity, shift, choice, **options)


@functools.cache
def compiled_step(device_type: str) -> Callable[..., Tensor]:
    """`decode_step`, compiled once per model, batch size and kind of choice.

    On a GPU each version becomes a CUDA graph, because launching the kernels one by one would take longer than they
    run; on a CPU it becomes one C++ function, because calling them from Python would take as long.
    """
    raise_recompile_limit()
    return torch.compile(decode_step, **COMPILE_OPTIONS.get(device_type, {}), fullgraph=True, dynamic=False)
