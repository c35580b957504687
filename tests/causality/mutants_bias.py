"""Mutants of the bias of the scores: ALiBi, a learned bias, an additive mask.

T queries, S keys, H query heads.
"""

import torch
import torch.nn.functional as F

from tests.causality.mutants import kernel, mutant
from tril.model import attention, backends, positions

ALIBI = {"pos": "alibi"}
SECOND = {"attention": "layer 0, head 0, query 1, key 0:"}


@mutant(**ALIBI)
def bias_of_the_newest_keys_in_the_first_columns(patch):
    original = positions.alibi_bias

    def changed(slopes, n_queries, n_keys, *, start=None):
        return F.pad(original(slopes, n_queries, n_queries), (0, n_keys - n_queries))  # (H, T, S)

    patch.setattr(positions, "alibi_bias", changed)


@mutant(**ALIBI)
def alibi_counted_from_the_start_of_the_chunk(patch):
    original = positions.alibi_bias
    patch.setattr(positions, "alibi_bias", lambda *sizes, start=None: original(*sizes, start=torch.tensor([0])))


@mutant(**ALIBI)
def alibi_without_the_position_of_the_step(patch):
    original = positions.alibi_bias

    def changed(*sizes, start=None):
        return original(*sizes, start=None if start is None else start * 0)

    patch.setattr(positions, "alibi_bias", changed)


@mutant(**ALIBI)
def last_position_with_the_bias_of_the_first(patch):
    original = attention.last_row

    def changed(x):
        return x[..., :1, :] if x is not None and x.is_floating_point() else original(x)

    patch.setattr(attention, "last_row", changed)


@mutant(**ALIBI)
def bias_dropped_with_a_mask(patch):
    original = attention.attention

    def changed(*qkv, mask, bias, **options):
        return original(*qkv, mask=mask, bias=bias if mask is None else None, **options)

    patch.setattr(attention, "attention", changed)


@mutant(backend="fused", **ALIBI)
def mask_dropped_with_a_bias(patch):
    patch.setattr(backends, "additive", lambda bias, mask: bias)


@mutant(backend="stacked", **ALIBI)
def bias_of_the_first_head_for_all(patch):
    def changed(original, q, k, v, masking, dropout_p):
        return original(q, k, v, masking._replace(bias=masking.bias[..., :1, :, :]), dropout_p)

    kernel(patch, changed, "stacked")


def ignore_infinities(patch):
    original = attention.visible_keys

    def changed(*sizes, bias, **options):
        return original(*sizes, bias=None if bias is None else torch.zeros_like(bias), **options)

    patch.setattr(attention, "visible_keys", changed)
