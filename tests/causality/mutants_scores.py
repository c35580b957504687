"""Mutants of the scores and of the softmax.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import torch
from torch import Tensor

from tests.causality.mutants import masked, mutant, rule, softmax
from tril.model import attention
from tril.model.masks import Masking


@mutant()
def mask_added_after_the_softmax(patch):
    softmax(
        patch, lambda products, visible, root: (products / root).softmax(-1) + masked(torch.zeros(()), visible, -1e9)
    )


@mutant()
def mask_multiplied_after_the_softmax(patch):
    """No hidden key has a weight, but the normalization includes the future."""
    softmax(patch, lambda products, visible, root: (products / root).softmax(-1) * visible)


@mutant()
def softmax_over_the_queries(patch):
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-2).nan_to_num())


def in_turn(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, S, D) -> (B, H, S, D), with the groups in turn instead of one after the other."""
    return x.repeat(1, q.shape[1] // x.shape[1], 1, 1)


@mutant()
def finite_mask_value(patch):
    softmax(patch, lambda products, visible, root: masked(products / root, visible, -1e4).softmax(-1))


@mutant()
def finite_mask_value_added(patch):
    softmax(
        patch, lambda products, visible, root: (products / root + masked(torch.zeros(()), visible, -1e4)).softmax(-1)
    )


@mutant()
def nan_in_the_first_row(patch):
    """NaN passes no check: it is neither 0 nor within a bound."""
    rule(patch, lambda query, key: key < query)
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-1))


@mutant()
def nan_in_fully_masked_rows_of_padding(patch):
    """NaN spreads through the values of the next layer: a weight of 0 times NaN is NaN."""
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-1))

    def naive(q, k, v, *, mask, bias, causal, window, dropout_p, **_):
        options = {"mask": mask, "bias": bias, "causal": causal, "window": window, "device": q.device}
        mask = attention.visible_keys(q.shape[2], k.shape[2], **options)
        return attention.explicit(q, k, v, Masking(mask, bias, False, None), dropout_p)[0]

    patch.setattr(attention, "attention", naive)
