"""Mutants of what a batch is made of: decoding in chunks, padding, documents, rows.

B batch, T positions, C width, G key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.causality.mutants import Patch, mutant
from tril.model import masks
from tril.model.causality import subject
from tril.model.gpt import GPT, Block
from tril.model.kv_cache import KVCache, LayerCache

END = 0  # end-of-text in the certificate's documents
LEARNED = {
    "pos": "learned",
    "context_length": 64,
}  # one config for all that rotary positions or a short context would not show


def stream(patch: Patch, changed: Callable[[Tensor], Tensor], layer: type = Block) -> None:
    """The output of every such layer goes through `changed`."""
    original = layer.forward
    patch.setattr(layer, "forward", lambda self, *rest, **options: changed(original(self, *rest, **options)))


def next_one(x: Tensor) -> Tensor:
    """Of (B, T, C), at each position the one behind it; the last has none: zeros."""
    return F.pad(x[:, 1:], (0, 0, 0, 1))


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1 "})
def rotary_offset_forgotten_in_decoding(patch):
    rope = GPT._rope
    patch.setattr(
        GPT, "_rope", lambda self, positions: rope(self, positions if positions.dim() > 1 else positions - positions[0])
    )


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1 "})
def rotary_offset_one_too_small_in_decoding(patch):
    rope = GPT._rope
    patch.setattr(GPT, "_rope", lambda self, p: rope(self, p if p.dim() > 1 else p - p[0].clamp(max=1)))


@mutant("decoding", where={"decoding": "chunks of 1: row 0, position 0 "}, **LEARNED)
def positions_counted_from_the_end(patch):
    """What leaks is how much is still to come, not what."""
    original = GPT.hidden

    def changed(self, ids, *, positions=None, **options):
        if positions is None:
            positions = torch.arange(-ids.shape[1], 0) + self.config.context_length
        return original(self, ids, positions=positions, **options)

    patch.setattr(GPT, "hidden", changed)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1 "})
def cache_not_advanced(patch):
    patch.setattr(KVCache, "advance", lambda self, n_positions: None)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 0 "})
def cache_with_its_empty_rest(patch):
    update = LayerCache.update

    def changed(self, k, v):
        update(self, k, v)
        return self.keys, self.values

    patch.setattr(LayerCache, "update", changed)


@mutant("decoding", where={"decoding": "chunks of 1: row 0, position 0 "})
def cache_of_another_row(patch):
    update = LayerCache.update
    patch.setattr(LayerCache, "update", lambda self, k, v: tuple(x.roll(1, 0) for x in update(self, k, v)))


@mutant("decoding", where={"decoding": "the last of random chunks alone: row 0, position [1-9]"})
def newest_position_taken_for_the_first(patch):
    def changed(self, x, *, last_only=False, **options):
        out = original(self, x, **options)
        return out[:, :1] if last_only else out

    original = Block.forward
    patch.setattr(Block, "forward", changed)


@mutant("decoding", where={"decoding": "the last of random chunks alone: row 0, position [1-9]"})
def newest_position_without_the_others(patch):
    """Keys and values are kept of it alone."""

    def changed(self, x, *, rope, last_only=False, **options):
        if last_only:
            x, rope = x[:, -1:], [part[..., -1:, :] for part in rope]
        return original(self, x, rope=rope, **options)

    original = Block.forward
    patch.setattr(Block, "forward", changed)


@mutant("decoding", where={"decoding": "[1-9][0-9]* places of padding: row ., position 0 "})
def padding_seen(patch):
    for module in (masks, subject):
        patch.setattr(module, "padding_mask", lambda visible: torch.ones_like(visible)[:, None, None])


@mutant("decoding", "documents", where={"documents": "the document at [1-9]"}, **LEARNED)
def positions_of_padding_and_documents_ignored(patch):
    original = GPT.hidden
    patch.setattr(GPT, "hidden", lambda self, ids, **options: original(self, ids, **{**options, "positions": None}))


@mutant("documents", where={"documents": "the document at [1-9][0-9]*: row 0, position 0 "})
def document_border_ignored(patch):
    for module in (masks, subject):
        patch.setattr(
            module, "document_mask", lambda documents: torch.ones_like(documents, dtype=torch.bool)[:, None, :, None]
        )


@mutant("documents", where={"documents": "the document at [1-9][0-9]*: row 0, position 0 "})
def end_of_text_left_with_the_text_before_it(patch):
    original = masks.document_mask
    for module in (masks, subject):
        patch.setattr(module, "document_mask", lambda documents: original(F.pad(documents, (1, 0))[:, :-1]))


@mutant("documents", where={"documents": "the document at 0: row 0, position [1-9]"})
def coming_end_of_text_seen(patch):
    def changed(self, ids, **options):
        out = original(self, ids, **options)
        return out + next_one((ids == END)[..., None].float())[:, -out.shape[1] :]

    original = GPT.hidden
    patch.setattr(GPT, "hidden", changed)


@mutant("rows", where={"rows": r"row \d changes with rows? "})
def batch_row_mixed_into_another(patch):
    stream(patch, lambda x: x + 0.1 * x.roll(1, 0))


@mutant("rows", where={"rows": r"row \d changes with rows? "})
def centred_over_the_batch(patch):
    stream(patch, lambda x: x - 0.1 * x.mean(0, keepdim=True))


@mutant("documents")
def leak_in_a_batch_of_one(patch):
    """As a squeeze() makes it: without its batch, the first axis is the sequence."""
    stream(patch, lambda x: x - 0.1 * x.squeeze(0).mean(0))


@mutant(
    "documents", "decoding", where={"documents": "beside others: row 0", "decoding": "with other tokens there: row"}
)
def faint_memory_of_what_is_hidden(patch):
    """Causal, and smaller than what another order of sums makes out; but a hidden token may not change a bit."""
    stream(patch, lambda x: x + 3e-7 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
