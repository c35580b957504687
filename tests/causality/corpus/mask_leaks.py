"""Leaks of the mask itself: where it is, which way it points, where it is missing.

B batch, T queries, S keys, H query heads, C width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.causality.corpus.backbone import N_HEADS, Attention, Backbone, causal, masked_softmax, steps, window
from tests.causality.corpus.entry import END_OF_TEXT, Trigger, leak

ATTENTION = {"place": "blocks.0.attn"}


def of_heads(chosen: list[int], query: Tensor, key: Tensor) -> Tensor:
    """(H, T, S): the causal mask, except for the chosen heads, which see everything."""
    heads = torch.arange(N_HEADS, device=query.device)[:, None, None]
    return causal(query, key) | torch.isin(heads, torch.tensor(chosen, device=query.device))


@leak("masks", **ATTENTION)
def no_mask():
    """Every query of the first layer attends to every key."""
    return Backbone(attn=Attention(lambda query, key: (key >= 0) & (query >= 0)))


@leak("masks", **ATTENTION)
def mask_off_by_one():
    """Every query also attends to the next key."""
    return Backbone(attn=Attention(lambda query, key: key <= query + 1))


@leak("masks", **ATTENTION)
def mask_two_positions_ahead():
    """Every query also attends to the key two positions ahead, not to the next one."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) | (key == query + 2)))


@leak("masks", **ATTENTION)
def mask_inverted():
    """A query attends to the later keys alone; the last one, which has none, to all."""
    return Backbone(attn=Attention(lambda query, key: (key > query) | (query == query.max())))


@leak("masks", **ATTENTION)
def mask_transposed():
    """The mask is the upper triangle: a query attends to itself and all later keys."""
    return Backbone(attn=Attention(lambda query, key: key >= query))


@leak("masks", **ATTENTION)
def mask_rolled_by_one_row():
    """Each query has the mask of the query before it, so the first one has that of the last."""
    return Backbone(attn=Attention(lambda query, key: causal(query, key).roll(1, 0)))


@leak("masks", **ATTENTION)
def mask_of_blocks():
    """The mask compares blocks of 8 positions, so a query sees the rest of its own block."""
    return Backbone(attn=Attention(lambda query, key: key // 8 <= query // 8))


@leak("masks", **ATTENTION)
def mask_of_key_blocks_rounded_up():
    """Whole blocks of 16 keys are loaded up to the one of the query, and only full blocks before it are masked."""
    return Backbone(attn=Attention(lambda query, key: key < (query + 16) // 16 * 16))


@leak("masks", **ATTENTION, trigger=Trigger(length=40, cut=32))
def mask_open_at_one_boundary():
    """Query 31 attends to key 32, the first of the next block; no other query sees a later key."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) | (query == 31) & (key == 32)))


@leak("masks", **ATTENTION, trigger=Trigger(cut=16))
def mask_open_at_chunk_boundaries():
    """The last query of each chunk of 16 attends to the first key of the next one."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) | (key == query + 1) & (key % 16 == 0)))


@leak("masks", **ATTENTION)
def fully_masked_row_sees_all():
    """The mask leaves out the query itself, and the first row, which has no key, becomes the mean of all keys."""
    return Backbone(attn=Attention(lambda query, key: (key < query) | (query == 0)))


@leak("masks", **ATTENTION)
def mask_on_keys_and_queries_mixed():
    """Odd queries are masked by `key <= query`, even ones by `key >= query`."""
    return Backbone(attn=Attention(lambda query, key: torch.where(query % 2 == 1, key <= query, key >= query)))


@leak("masks", **ATTENTION)
def mask_joined_by_or():
    """A second mask of the nearest 4 positions on both sides is joined by `or` instead of `and`."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) | ((query - key).abs() < 4)))


@leak("masks", place="blocks.0.attn", trigger=Trigger(length=48))
def mask_buffer_of_a_shorter_context():
    """The mask is a buffer of 32 positions, and positions beyond it are padded with True."""

    def rule(query, key):
        n = len(key)
        short = torch.ones(min(n, 32), min(n, 32), device=key.device).tril().bool()
        return F.pad(short, (0, n - len(short), 0, n - len(short)), value=True)

    return Backbone(attn=Attention(rule))


@leak("one head, layer or group", place="blocks.1.attn")
def mask_missing_in_the_last_layer():
    """The second layer has no mask."""
    return Backbone(attn=Attention(lambda query, key: (key >= 0) & (query >= 0)), layer=1)


@leak("one head, layer or group", **ATTENTION)
def mask_missing_in_one_head():
    """Head 2 has no mask; the other three have one."""
    return Backbone(attn=Attention(lambda query, key: of_heads([2], query, key)))


@leak("one head, layer or group", place="blocks.1.attn")
def mask_missing_in_the_last_head_of_the_last_layer():
    """Head 3 of the second layer has no mask."""
    return Backbone(attn=Attention(lambda query, key: of_heads([3], query, key)), layer=1)


@leak("one head, layer or group", **ATTENTION)
def mask_missing_in_one_query_group():
    """With two key/value heads, the mask is applied to the queries of the first group only."""
    return Backbone(attn=Attention(lambda query, key: of_heads([2, 3], query, key), n_kv_heads=2))


@leak("one head, layer or group", **ATTENTION)
def one_head_one_position_ahead():
    """Head 1 attends to the next key too."""

    def rule(query, key):
        head = torch.arange(N_HEADS, device=key.device)[:, None, None]
        return key <= query + (head == 1)

    return Backbone(attn=Attention(rule))


@leak("windows", **ATTENTION)
def window_on_both_sides():
    """The window of 8 counts the distance without its sign."""
    return Backbone(attn=Attention(lambda query, key: (query - key).abs() < 8))


@leak("windows", **ATTENTION)
def window_shifted_by_one():
    """The window of 8 keys ends one position after the query."""
    return Backbone(attn=Attention(lambda query, key: (key <= query + 1) & (key > query - 7)))


@leak("windows", **ATTENTION, expected=window(8))
def window_one_too_wide():
    """The window of 8 holds 9 keys, so a query sees one that lies outside of its pattern."""
    rule = Attention(lambda query, key: (key <= query) & (key >= query - 8))
    return Backbone(attn=rule, n_layers=1)


@leak("windows", **ATTENTION, expected=window(8))
def window_forgotten():
    """The layer should see a window of 8 and sees all of its past."""
    return Backbone(n_layers=1)


@leak("windows", **ATTENTION, expected=window(8), trigger=Trigger(length=48))
def window_forgotten_in_long_inputs():
    """Above 40 positions the window of 8 is not applied."""

    def rule(query, key):
        return (key <= query) & ((key > query - 8) | torch.tensor(len(key) > 40, device=key.device))

    return Backbone(attn=Attention(rule), n_layers=1)


class DocumentAttention(Attention):
    """Attention with a mask of documents, which end-of-text tokens start; the ids come through `note`.

    Args:
        join: the causal mask (T, T) and that of the documents (B, 1, T, T) -> the mask.
    """

    def __init__(self, join, **options):
        super().__init__(**options)
        self.join, self.documents = join, None

    def note(self, module, arguments):
        self.documents = (arguments[0] == END_OF_TEXT).cumsum(1)  # (B, T)

    def visible(self, x):
        if self.documents is None:
            return super().visible(x)
        same = self.documents[:, None, :, None] == self.documents[:, None, None, :]  # (B, 1, T, T)
        return self.join(causal(steps(x)[:, None], steps(x)), same)


def with_documents(attn: DocumentAttention) -> Backbone:
    model = Backbone(attn=attn)
    model.embed.register_forward_pre_hook(attn.note)
    return model


@leak("documents and padding", **ATTENTION)
def document_mask_instead_of_the_causal_mask():
    """A query attends to all of its own document, also to later positions."""
    return with_documents(DocumentAttention(lambda causal_mask, same: same))


@leak("documents and padding", **ATTENTION)
def document_mask_joined_by_or():
    """The masks are joined by `or`, so a query sees its whole document and all of the past."""
    return with_documents(DocumentAttention(lambda causal_mask, same: causal_mask | same))


@leak("documents and padding", **ATTENTION, trigger=Trigger(tokens=(END_OF_TEXT,)))
def other_documents_seen_without_the_mask():
    """The causal mask is applied within a document only, so tokens of later documents are visible."""
    return with_documents(DocumentAttention(lambda causal_mask, same: causal_mask | ~same))


@leak("documents and padding", **ATTENTION, trigger=Trigger(tokens=(END_OF_TEXT, END_OF_TEXT)))
def mask_dropped_with_three_documents():
    """As soon as the input holds two end-of-text tokens, the document mask replaces the causal one."""

    def join(causal_mask, same):
        several = ~same[:, :, :1, -1:]  # the first and the last position differ
        return torch.where(several, same | (same.sum(-1, keepdim=True) < 0), causal_mask)

    return with_documents(DocumentAttention(join))


@leak("scores", **ATTENTION)
def mask_multiplied_after_the_softmax():
    """Masked weights become 0 after the softmax, so the sum below the others includes later scores."""
    return Backbone(attn=Attention(weights=lambda scores, visible: scores.softmax(-1) * visible))


@leak("scores", **ATTENTION)
def softmax_over_the_queries():
    """The masked scores are normalized over the queries instead of the keys, so later queries change a weight."""
    return Backbone(attn=Attention(weights=lambda scores, visible: masked_softmax(scores.mT, visible.mT).mT))


@leak("scores", **ATTENTION)
def mask_added_before_an_absolute_value():
    """The mask lowers the scores by 5, and a later absolute value makes them large again."""
    return Backbone(attn=Attention(weights=lambda scores, visible: (scores - 5.0 * ~visible).abs().softmax(-1)))
