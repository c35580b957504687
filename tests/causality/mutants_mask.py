"""Mutants of the mask.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import torch
import torch.nn.functional as F

from tests.causality.mutants import causal_if, kernel, mutant, rule
from tril.model import attention
from tril.model.gpt import GPT
from tril.model.offset_keys import OffsetKeys


@mutant()
def mask_off_by_one_shows_the_next(patch):
    rule(patch, lambda query, key: key <= query + 1)


@mutant()
def mask_off_by_one_hides_itself(patch):
    """The residual stream still carries each token to its own output, so no dependency is missing."""
    rule(patch, lambda query, key: key < query)


@mutant(backend="fused")
def no_mask(patch):
    kernel(patch, lambda original, q, k, v, masking, p: original(q, k, v, masking._replace(causal=False), p), "fused")


@mutant()
def mask_transposed(patch):
    rule(patch, lambda query, key: key >= query)


@mutant(backend="fused")
def wrong_corner_under_a_cache(patch):
    """torch's is_causal aligns the first query with the first key."""

    def changed(original, q, k, v, masking, dropout_p):
        if not masking.causal or masking.window is not None:
            return original(q, k, v, masking, dropout_p)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=True), None

    kernel(patch, changed, "fused")


@mutant()
def no_mask_inside_a_chunk(patch):
    causal_if(patch, lambda q, k, dropout_p: q.shape[2] == k.shape[2])


@mutant(window=10)
def window_one_too_wide(patch):
    rule(patch, lambda query, key: (key <= query) & (key >= query - 10))


@mutant(window=10)
def window_one_too_narrow(patch):
    rule(patch, lambda query, key: (key <= query) & (key > query - 9))


@mutant(window=10)
def window_one_too_wide_at_the_first_hidden_key(patch):
    """Two layers may see as far as that; only the weights of a single layer show it."""

    def changed(original, q, k, v, masking, dropout_p):
        window = None if masking.window == k.shape[2] - 1 else masking.window
        return original(q, k, v, masking._replace(window=window), dropout_p)

    kernel(patch, changed)


@mutant(window=10)
def window_forgotten_under_a_cache(patch):
    def changed(original, q, k, v, masking, dropout_p):
        window = masking.window if q.shape[2] == k.shape[2] else None
        return original(q, k, v, masking._replace(window=window), dropout_p)

    kernel(patch, changed)


@mutant(window=10)
def window_forgotten_with_a_mask(patch):
    original = attention.visible_keys
    patch.setattr(attention, "visible_keys", lambda *sizes, **options: original(*sizes, **{**options, "window": None}))


@mutant()
def future_seen_with_a_mask(patch):
    def seen(n_queries, n_keys, *, mask, **options):
        return None if mask is None else attention.as_boolean(mask)

    patch.setattr(attention, "visible_keys", seen)


@mutant()
def keys_of_the_next_position(patch):
    patch.setattr(OffsetKeys, "shift", lambda self, k, cache=None: (k + k.roll(-1, dims=2)) / 2)


@mutant()
def half_a_key_of_another_document(patch):
    patch.setattr(OffsetKeys, "separate", lambda self, k, n_queries, **options: k)


@mutant()
def offset_of_the_keys_within_a_chunk_alone(patch):
    original = OffsetKeys.shift
    patch.setattr(OffsetKeys, "shift", lambda self, k, cache=None: original(self, k))


@mutant()
def leak_at_every_chunk_boundary(patch):
    rule(patch, lambda query, key: (key <= query) | ((key == query + 1) & (key % 16 == 0)))


@mutant()
def leak_at_one_boundary(patch):
    rule(patch, lambda query, key: (key <= query) | ((query == 31) & (key == 32)))


@mutant()
def past_forgotten_at_chunk_boundaries(patch):
    rule(patch, lambda query, key: (key <= query) & (key // 16 == query // 16))


@mutant()
def mask_on_the_first_head_only(patch):
    def changed(original, q, k, v, masking, p):
        k, v = attention.repeat_heads(k, q), attention.repeat_heads(v, q)  # (B, H, S, D)
        first = original(q[:, :1], k[:, :1], v[:, :1], masking, p)
        others = original(q[:, 1:], k[:, 1:], v[:, 1:], masking._replace(causal=False), p)
        return [torch.cat(pair, dim=1) for pair in zip(first, others, strict=True)]

    kernel(patch, changed)


@mutant()
def leak_in_one_head_of_one_layer(patch):
    def leaky(q, k, v, masking, dropout_p):
        out, _ = attention.explicit(q, k, v, masking, dropout_p)
        unmasked, _ = attention.explicit(q, k, v, masking._replace(causal=False), dropout_p)
        return torch.cat((out[:, :2], unmasked[:, 2:3], out[:, 3:]), dim=1), None  # (B, H, T, D)

    original = GPT.__init__

    def init(self, config):
        original(self, config)
        self.blocks[1].attn.backend = "leaky"

    patch.setitem(attention.BACKENDS, "leaky", leaky)
    patch.setattr(GPT, "__init__", init)


@mutant()
def leak_at_the_full_context_only(patch):
    causal_if(patch, lambda q, k, dropout_p: q.shape[2] != 40)


@mutant()
def leak_at_multiples_of_32_only(patch):
    """As a fast path could have it."""
    causal_if(patch, lambda q, k, dropout_p: q.shape[2] % 32 > 0)


@mutant()
def mask_dropped_with_dropout(patch):
    causal_if(patch, lambda q, k, dropout_p: dropout_p == 0)
