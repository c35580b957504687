"""The attention weights of a running model, captured by hooks that leave its outputs unchanged.

Letters: B batch, T queries, S keys, H heads, L layers, N windows.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tril.model.attention import MultiHeadAttention
from tril.model.generation.generate import TOKENS_PER_BATCH, inference
from tril.model.gpt import GPT
from tril.model.masks import document_options


@dataclass(frozen=True)
class TokenWindows:
    """Windows of a text that a model is measured on.

    Attributes:
        ids: (N, T) int64.
        targets: (N, T) int64.
        document_eot: id of the token that starts a document, if the model was trained with separate documents; None: a
            window is one text.
    """

    ids: Tensor
    targets: Tensor
    document_eot: int | None = None

    def batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        """Yields ids (B, T), targets (B, T) and the matching options for `GPT.forward`, in order."""
        size = max(1, TOKENS_PER_BATCH // self.ids.shape[1])
        for ids, targets in zip(self.ids.split(size), self.targets.split(size), strict=True):
            ids = ids.to(device)
            yield ids, targets.to(device), document_options(ids, self.document_eot)


@contextlib.contextmanager
def capture_attention(model: GPT, callback: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Within the context, every forward pass calls callback(layer, weights (B, H, T, S)) for one layer after another.

    The weights are float32 (float64 for a float64 model), before dropout and without gradient. A second pass of each
    attention layer computes them, so the outputs of the model stay bitwise equal: `need_weights` in the first pass
    would select the explicit backend, which rounds differently. Layers without attention are skipped.
    """

    def compute_weights(layer: int, attn: MultiHeadAttention, args, kwargs, result) -> None:
        with inference(attn):
            # Not attn(...), which would run this hook again. A cache is written twice, with equal keys and values.
            _, weights = attn.forward(*args, **kwargs | {"need_weights": True})
        callback(layer, weights)

    with contextlib.ExitStack() as hooks:
        for layer, block in enumerate(model.blocks):
            if isinstance(block.attn, MultiHeadAttention):
                hook = functools.partial(compute_weights, layer)
                hooks.enter_context(block.attn.register_forward_hook(hook, with_kwargs=True))
        yield


def attention_maps(model: GPT, ids: Tensor, **options: Any) -> Tensor:
    """The attention weights of every head of a model with heads, in evaluation mode.

    Args:
        ids: (B, T) int64.
        **options: `mask` and `positions` of `GPT.forward`.

    Returns:
        (L, B, H, T, T).

    Raises:
        ValueError: T exceeds `context_length`.
    """
    maps = []
    with inference(model), capture_attention(model, lambda layer, weights: maps.append(weights)):
        model.hidden(ids, **options)
    return torch.stack(maps)
