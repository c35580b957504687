"""Mutants of the scores and of the softmax.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from tests.model.causality.mutants import kernel, masked, mutant, rule, softmax
from tril.model import attention
from tril.model.masks import Masking


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 0, key 1: weight -1e"})
def mask_added_after_the_softmax(patch):
    softmax(
        patch, lambda products, visible, root: (products / root).softmax(-1) + masked(torch.zeros(()), visible, -1e9)
    )


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 0, key 0:"})
def mask_multiplied_after_the_softmax(patch):
    """No hidden key has a weight, but the normalization includes the future."""
    softmax(patch, lambda products, visible, root: (products / root).softmax(-1) * visible)


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 0, key 0:"})
def softmax_over_the_queries(patch):
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-2).nan_to_num())


@mutant("attention", where={"attention": "layer 0, head 0, query 1, key 0:"})
def missing_scale(patch):
    softmax(patch, lambda products, visible, root: masked(products, visible).softmax(-1))


@mutant("attention", where={"attention": "layer 0, head 0, query 1, key 0:"})
def floor_division_by_the_root(patch):
    softmax(
        patch, lambda products, visible, root: masked(products.div(root, rounding_mode="floor"), visible).softmax(-1)
    )


def in_turn(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D), with the groups in turn instead of one after the other."""
    return x.repeat(1, q.shape[1] // x.shape[1], 1, 1)


@mutant("attention", where={"attention": "layer 0, head 1, query 1, key 0:"})
def keys_of_the_wrong_group(patch):
    kernel(patch, lambda original, q, k, v, *rest: original(q, in_turn(k, q), attention.repeat_heads(v, q), *rest))


@mutant("attention", where={"attention": "layer 0, head 1, query 0, key 0: weight 2,"})
def values_of_the_wrong_group(patch):
    kernel(patch, lambda original, q, k, v, *rest: original(q, attention.repeat_heads(k, q), in_turn(v, q), *rest))


@mutant("no future", "attention", where={"no future": "weights=sharp", "attention": "weights=sharp"})
def finite_mask_value(patch):
    softmax(patch, lambda products, visible, root: masked(products / root, visible, -1e4).softmax(-1))


@mutant("no future", "attention", where={"no future": "weights=sharp", "attention": "weights=sharp"})
def finite_mask_value_added(patch):
    softmax(
        patch, lambda products, visible, root: (products / root + masked(torch.zeros(()), visible, -1e4)).softmax(-1)
    )


@mutant(
    "no future",
    "all of the past",
    "attention",
    "decoding",
    "canary",
    where={"attention": "layer 0, head 0, query 0, key 0:"},
)
def nan_in_the_first_row(patch):
    """NaN passes no check: it is neither 0 nor within a bound."""
    rule(patch, lambda query, key: key < query)
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-1))


@mutant("padding", where={"padding": "left-padded by [1-9][0-9]* tokens: row ., position 0[ ,]"})
def nan_in_fully_masked_rows_of_padding(patch):
    """NaN spreads through the values of the next layer: a weight of 0 times NaN is NaN."""
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-1))

    def naive(q, k, v, *, mask, bias, causal, window, dropout_p, **_):
        options = {"mask": mask, "bias": bias, "causal": causal, "window": window, "device": q.device}
        mask = attention.visible_keys(q.shape[2], k.shape[2], **options)
        return attention.explicit(q, k, v, Masking(mask, bias, False, None), dropout_p)[0]

    patch.setattr(attention, "attention", naive)
