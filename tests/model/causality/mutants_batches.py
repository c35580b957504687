"""Mutants of decoding in chunks, padding, documents and rows of a batch.

B batch, T positions, C width, G key/value heads, D head size.
"""

import torch
import torch.nn.functional as F

from tests.model.causality.mutants import LEARNED, mutant, next_token, stream
from tril.model import masks
from tril.model.causality import subject
from tril.model.gpt import GPT, Block
from tril.model.kv_cache import KVCache, LayerCache
from tril.model.positions import Rope

END = 0  # end-of-text in the certificate's documents


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1[ ,]"})
def rotary_offset_forgotten_in_decoding(patch):
    rope = Rope.rotation
    patch.setattr(Rope, "rotation", lambda self, p: rope(self, p if p.dim() > 1 else p - p[0]))


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1[ ,]"})
def rotary_offset_one_too_small_in_decoding(patch):
    rope = Rope.rotation
    patch.setattr(Rope, "rotation", lambda self, p: rope(self, p if p.dim() > 1 else p - p[0].clamp(max=1)))


@mutant("decoding", where={"decoding": "chunks of 1: row 0, position 0[ ,]"}, **LEARNED)
def positions_counted_from_the_end(patch):
    """Leaks the number of later tokens, not the tokens."""
    original = GPT.hidden

    def changed(self, ids, *, positions=None, **options):
        if positions is None:
            positions = torch.arange(-ids.shape[1], 0) + self.config.context_length
        return original(self, ids, positions=positions, **options)

    patch.setattr(GPT, "hidden", changed)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1[ ,]"})
def cache_not_advanced(patch):
    patch.setattr(KVCache, "advance", lambda self, n_positions: None)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 0[ ,]"})
def cache_with_unwritten_positions(patch):
    update = LayerCache.update

    def changed(self, k, v):
        update(self, k, v)
        return self.keys, self.values

    patch.setattr(LayerCache, "update", changed)


@mutant("decoding", where={"decoding": "chunks of 1: row 0, position 0[ ,]"})
def cache_of_another_row(patch):
    update = LayerCache.update
    patch.setattr(LayerCache, "update", lambda self, k, v: tuple(x.roll(1, 0) for x in update(self, k, v)))


@mutant("decoding", where={"decoding": "last position of random chunks: row 0, position [1-9]"})
def last_position_replaced_by_the_first(patch):
    def changed(self, x, *, last_only=False, **options):
        out = original(self, x, **options)
        return out[:, :1] if last_only else out

    original = Block.forward
    patch.setattr(Block, "forward", changed)


@mutant("decoding", where={"decoding": "last position of random chunks: row 0, position [1-9]"})
def last_position_without_the_others(patch):
    """Only its own key and value are computed."""

    def changed(self, x, *, rope, last_only=False, **options):
        if last_only:
            x, rope = x[:, -1:], [part[..., -1:, :] for part in rope]
        return original(self, x, rope=rope, **options)

    original = Block.forward
    patch.setattr(Block, "forward", changed)


@mutant("padding", where={"padding": "left-padded by [1-9][0-9]* tokens: row ., position 0[ ,]"})
def padding_seen(patch):
    for module in (masks, subject):
        patch.setattr(module, "padding_mask", lambda visible: torch.ones_like(visible)[:, None, None])


@mutant("decoding", "documents", where={"documents": "the document at [1-9]"}, **LEARNED)
def positions_of_padding_and_documents_ignored(patch):
    original = GPT.hidden
    patch.setattr(GPT, "hidden", lambda self, ids, **options: original(self, ids, **{**options, "positions": None}))


@mutant("documents", where={"documents": "the document at [1-9][0-9]*: row 0, position 0[ ,]"})
def document_boundary_ignored(patch):
    for module in (masks, subject):
        patch.setattr(
            module, "document_mask", lambda documents: torch.ones_like(documents, dtype=torch.bool)[:, None, :, None]
        )


@mutant("documents", where={"documents": "the document at [1-9][0-9]*: row 0, position 0[ ,]"})
def end_of_text_in_the_previous_document(patch):
    original = masks.document_mask
    for module in (masks, subject):
        patch.setattr(module, "document_mask", lambda documents: original(F.pad(documents, (1, 0))[:, :-1]))


@mutant("documents", where={"documents": "the document at 0: row 0, position [1-9]"})
def next_end_of_text_seen(patch):
    def changed(self, ids, **options):
        out = original(self, ids, **options)
        return out + next_token((ids == END)[..., None].float())[:, -out.shape[1] :]

    original = GPT.hidden
    patch.setattr(GPT, "hidden", changed)


@mutant("rows", where={"rows": r"row \d changes with rows? "})
def batch_row_mixed_into_another(patch):
    stream(patch, lambda x: x + 0.1 * x.roll(1, 0))


@mutant("rows", where={"rows": r"row \d changes with rows? "})
def centered_over_the_batch(patch):
    stream(patch, lambda x: x - 0.1 * x.mean(0, keepdim=True))


@mutant("documents")
def leak_in_a_batch_of_one(patch):
    """As squeeze() causes it: without the batch dimension, the first one is the sequence."""
    stream(patch, lambda x: x - 0.1 * x.squeeze(0).mean(0))


@mutant(
    "documents",
    "padding",
    where={"documents": "with other documents changed: row 0", "padding": "with other padding tokens: row"},
)
def small_trace_of_hidden_tokens(patch):
    """Causal, and smaller than the rounding of sums in another order, but a hidden token may not change a bit."""
    stream(patch, lambda x: x + 3e-7 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])
