"""Mutants of the bias of the scores: ALiBi, a learned bias, an additive mask.

T queries, S keys, H query heads.
"""

import math

import torch
import torch.nn.functional as F

from tests.model.causality.mutants import NEXT, kernel, mutant
from tril.model import attention, backends, positions

ALIBI = {"pos": "alibi"}
SECOND = {"attention": "layer 0, head 0, query 1, key 0:"}


@mutant("attention", where=SECOND, **ALIBI)
def alibi_with_the_wrong_sign(patch):
    original = positions.alibi_bias
    patch.setattr(positions, "alibi_bias", lambda *sizes, **options: -original(*sizes, **options))


@mutant("attention", where=SECOND, **ALIBI)
def alibi_slopes_in_reverse_order(patch):
    original = positions.alibi_slopes
    patch.setattr(positions, "alibi_slopes", lambda n_heads: original(n_heads).flip(0))


@mutant("attention", where=SECOND, **ALIBI | {"n_heads": 6, "n_kv_heads": 3, "head_dim": 8})
def alibi_slopes_of_a_power_of_two_for_any_number(patch):
    patch.setattr(positions, "alibi_slopes", lambda n_heads: 2 ** (-8 * torch.arange(1, n_heads + 1) / n_heads))


@mutant("attention", where=SECOND, **ALIBI)
def bias_added_before_the_scale(patch):
    def changed(original, q, k, v, masking, dropout_p):
        return original(q, k, v, masking._replace(bias=masking.bias / math.sqrt(q.shape[-1])), dropout_p)

    kernel(patch, changed)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1[ ,]"}, **ALIBI)
def bias_of_the_newest_keys_in_the_first_columns(patch):
    original = positions.alibi_bias

    def changed(slopes, n_queries, n_keys, *, start=None):
        return F.pad(original(slopes, n_queries, n_queries), (0, n_keys - n_queries))  # (H, T, S)

    patch.setattr(positions, "alibi_bias", changed)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1[ ,]"}, **ALIBI)
def alibi_counted_from_the_start_of_the_chunk(patch):
    original = positions.alibi_bias
    patch.setattr(positions, "alibi_bias", lambda *sizes, start=None: original(*sizes, start=torch.tensor([0])))


@mutant("decoding", where={"decoding": "steps of constant shape: row 0, position 18[ ,]"}, **ALIBI)
def alibi_without_the_position_of_the_step(patch):
    original = positions.alibi_bias

    def changed(*sizes, start=None):
        return original(*sizes, start=None if start is None else start * 0)

    patch.setattr(positions, "alibi_bias", changed)


@mutant("decoding", where={"decoding": "last position of random chunks: row 0, position [1-9]"}, **ALIBI)
def last_position_with_the_bias_of_the_first(patch):
    original = attention.last_row

    def changed(x):
        return x[..., :1, :] if x is not None and x.is_floating_point() else original(x)

    patch.setattr(attention, "last_row", changed)


@mutant(
    "padding",
    "documents",
    where={"padding": "left-padded by 18 tokens: row 1, position 1[ ,]", "documents": "at 0: row 0, position 1 "},
    **ALIBI,
)
def bias_dropped_with_a_mask(patch):
    original = attention.attention

    def changed(*qkv, mask, bias, **options):
        return original(*qkv, mask=mask, bias=bias if mask is None else None, **options)

    patch.setattr(attention, "attention", changed)


@mutant("no future", "attention", "decoding", "documents", "canary", where=NEXT, backend="fused", **ALIBI)
def mask_dropped_with_a_bias(patch):
    patch.setattr(backends, "additive", lambda bias, mask: bias)


@mutant("attention", where={"attention": "layer 0, head 1, query 1, key 0:"}, backend="stacked", **ALIBI)
def bias_of_the_first_head_for_all(patch):
    def changed(original, q, k, v, masking, dropout_p):
        return original(q, k, v, masking._replace(bias=masking.bias[..., :1, :, :]), dropout_p)

    kernel(patch, changed, "stacked")


@mutant("attention", where=SECOND, backend="flex", context_length=24, **ALIBI)
def bias_ignored_by_flex(patch):
    patch.setattr(backends, "score_mod", lambda q, k, bias: None)


def ignore_infinities(patch):
    original = attention.visible_keys

    def changed(*sizes, bias, **options):
        return original(*sizes, bias=None if bias is None else torch.zeros_like(bias), **options)

    patch.setattr(attention, "visible_keys", changed)


@mutant(
    "no future",
    "attention",
    where={"no future": "query 1 .*key 0 outside the window", "attention": "head 0, query 0, key 0: .*on a hidden key"},
    part="learned bias",
)
def infinite_bias_ignored(patch):
    ignore_infinities(patch)


@mutant("no future", "attention", where=NEXT, part="additive mask")
def additive_mask_ignored(patch):
    ignore_infinities(patch)


@mutant(
    "no future", "attention", where={"no future": "weights=sharp", "attention": "weights=sharp"}, part="additive mask"
)
def infinite_bias_as_a_finite_number(patch):
    original = attention.attention
    patch.setattr(
        attention, "attention", lambda *qkv, bias, **options: original(*qkv, bias=bias.clamp(min=-1e4), **options)
    )


@mutant(
    "attention", where={"attention": "head 0, query 0, key 0: weight 1 on a hidden key .*length=1"}, part="learned bias"
)
def fully_masked_rows_not_zeroed(patch):
    original = attention.open_fully_masked_rows
    patch.setattr(attention, "open_fully_masked_rows", lambda mask: (original(mask)[0], torch.tensor(False)))


@mutant("no future", "attention", "decoding", "documents", part="learned bias")
def nan_in_rows_that_the_bias_hides(patch):
    patch.setattr(attention, "open_fully_masked_rows", lambda mask: (mask, torch.tensor(False)))
