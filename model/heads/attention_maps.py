"""What a model's attention does while it runs: the weights of every layer, seen by hooks that leave the outputs as they are.

B batch, T queries, S keys, H heads, L layers, N windows.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tril.model.generation.generate import inference
from tril.model.gpt import GPT
from tril.model.masks import document_mask, split_documents

TOKENS_AT_ONCE = 2048  # in one forward pass: enough to keep a CPU busy, and the logits of a large vocabulary still fit


@dataclass(frozen=True)
class Text:
    """Windows of a text that a model is looked at over.

    ids, targets  int64 (N, T)
    document_eot  id of the token that opens a document, where the model was trained on documents kept apart; None: a window is one text
    """

    ids: Tensor
    targets: Tensor
    document_eot: int | None = None

    def batches(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        """ids, targets (B, T) and the options for `GPT.forward` that belong to them, in order."""
        size = max(1, TOKENS_AT_ONCE // self.ids.shape[1])
        for ids, targets in zip(self.ids.split(size), self.targets.split(size)):
            ids = ids.to(device)
            yield ids, targets.to(device), within_documents(ids, self.document_eot)


def within_documents(ids: Tensor, document_eot: int | None) -> dict[str, Tensor]:
    """Options for `GPT.forward` that keep the documents in ids (B, T) apart, as in training; none for None."""
    if document_eot is None:
        return {}
    documents, positions = split_documents(ids, document_eot)  # (B, T) each
    return {"mask": document_mask(documents), "positions": positions}


@contextlib.contextmanager
def observed_weights(model: GPT, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While it is open, every forward pass calls see(layer, weights (B, H, T, S)) for one layer after another.

    The weights are float32 (float64 of a float64 model), before dropout; nothing keeps them but `see`. The model's outputs stay the same
    to the bit. A layer without attention is not seen. Do not open a second one of the same model within it.
    """

    def ask(module, args, kwargs):
        return args, kwargs | {"need_weights": True}

    def take(layer: int, result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        assert isinstance(result, tuple), "the weights have been taken already, by another observed_weights"
        out, weights = result
        see(layer, weights)
        return out

    hooks = []
    try:
        for layer, block in enumerate(model.blocks):
            if block.attn is not None:
                hooks.append(block.attn.register_forward_pre_hook(ask, with_kwargs=True))
                hooks.append(
                    block.attn.register_forward_hook(lambda module, args, result, layer=layer: take(layer, result))
                )
        yield
    finally:
        for hook in hooks:
            hook.remove()


def attention_maps(model: GPT, ids: Tensor, **options: Tensor) -> Tensor:
    """ids (B, T) -> the weights of every head, (L, B, H, T, T), in evaluation mode; `options` as `mask` and `positions` of `GPT.forward`.

    Raises ValueError for a model without heads, and where T exceeds `context_length`.
    """
    if model.config.n_heads == 0:
        raise ValueError("model.n_heads=0: blocks without attention have no weights to show; take a model with heads")
    maps = []
    with inference(list(model.modules())), observed_weights(model, lambda layer, weights: maps.append(weights)):
        model.hidden(ids, **options)
    return torch.stack(maps)
