"""Leaks of the scores and of the softmax: values of the mask, statistics over hidden keys, selection among them.

B batch, T queries, S keys, H query heads.
"""

import torch
from torch import Tensor

from tests.causality.corpus.backbone import N_HEADS, Attention, Backbone, masked_softmax
from tests.causality.corpus.entry import leak

ATTENTION = {"place": "blocks.0.attn"}


def with_weights(weights, **options) -> Backbone:
    return Backbone(attn=Attention(weights=weights, **options))


@leak("scores", **ATTENTION)
def finite_mask_value_below_large_scores():
    """Masked scores become -1e4, which is larger than the visible scores of some queries."""
    return with_weights(lambda scores, visible: scores.masked_fill(~visible, -1e4).softmax(-1), scale=1e6)


@leak("scores", **ATTENTION)
def finite_mask_value_added_to_large_scores():
    """The mask adds -1000 to scores that differ by more than that."""
    return with_weights(lambda scores, visible: (scores - 1000.0 * ~visible).softmax(-1), scale=1e4)


@leak("scores", **ATTENTION)
def mask_value_of_minus_ten():
    """The mask adds -10, which leaves each hidden key a weight of about exp(-10)."""
    return with_weights(lambda scores, visible: (scores - 10.0 * ~visible).softmax(-1))


@leak("scores", **ATTENTION)
def boolean_mask_added_as_numbers():
    """The mask of zeros and ones is added to the scores, which raises the visible ones by 1 and hides nothing."""
    return with_weights(lambda scores, visible: (scores + visible).softmax(-1))


@leak("scores", **ATTENTION)
def mask_multiplied_before_the_softmax():
    """Masked scores become 0, whose exponential is 1."""
    return with_weights(lambda scores, visible: (scores * visible).softmax(-1))


@leak("scores", **ATTENTION)
def distance_penalty_without_a_mask():
    """A penalty that grows with the distance replaces the mask, and it has no sign."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        position = torch.arange(scores.shape[-1], device=scores.device)
        return (scores - 0.5 * (position[:, None] - position).abs()).softmax(-1)

    return with_weights(weights)


@leak("scores", **ATTENTION)
def mask_dropped_with_a_bias():
    """The kernel takes a bias or a mask; heads with a bias have no mask."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        position = torch.arange(scores.shape[-1], device=scores.device)
        slope = torch.tensor([0.0, 0.0, 0.25, 0.5], device=scores.device)[:, None, None]  # of H heads
        biased = scores - slope * (position[:, None] - position).abs()
        return torch.where(slope > 0, biased.softmax(-1), masked_softmax(scores, visible))

    assert N_HEADS == 4
    return with_weights(weights)


@leak("scores", **ATTENTION)
def largest_scores_chosen_before_the_mask():
    """The four largest scores of each query are kept, and hidden keys take part in the choice."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        least = scores.topk(min(4, scores.shape[-1]), -1).values[..., -1:]
        own = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
        return masked_softmax(scores, visible & ((scores >= least) | own))

    return with_weights(weights)


@leak("scores", **ATTENTION)
def scores_standardized_over_all_keys():
    """Scores are divided by their standard deviation over all keys before the mask is applied."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax(scores / (scores.square().mean(-1, keepdim=True) + 0.01).sqrt(), visible)

    return with_weights(weights)


@leak("scores", **ATTENTION)
def scores_clipped_at_a_quantile_of_all_keys():
    """Scores above the 90 % quantile of the whole row are clipped to it, hidden keys included."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax(scores.minimum(scores.quantile(0.9, dim=-1, keepdim=True)), visible)

    return with_weights(weights)


@leak("scores", **ATTENTION)
def softmax_plus_one_with_the_largest_hidden_score():
    """The 1 in the denominator is not scaled by the maximum, which is taken over hidden keys too."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        powers = (scores - scores.amax(-1, keepdim=True)).exp() * visible
        return powers / (1 + powers.sum(-1, keepdim=True))

    return with_weights(weights)


@leak("scores", **ATTENTION)
def epsilon_beside_the_largest_hidden_score():
    """The denominator has an epsilon of 1e-3 next to powers that are scaled by the maximum over all keys."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        powers = (scores - scores.amax(-1, keepdim=True)).exp() * visible
        return powers / (powers.sum(-1, keepdim=True) + 1e-3)

    return with_weights(weights, scale=2.0)


@leak("scores", **ATTENTION)
def scores_mixed_between_heads_after_the_mask():
    """Heads exchange their weights after the softmax, and one of them has no mask."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        parts = [masked_softmax(scores[:, :3], visible), scores[:, 3:].softmax(-1)]
        return torch.cat(parts, 1).roll(1, 1) * 0.5 + 0.5 * masked_softmax(scores, visible)

    return with_weights(weights)


@leak("scores", **ATTENTION)
def temperature_from_all_scores():
    """The temperature of the softmax is the mean size of the scores of all queries and keys."""
    return with_weights(lambda scores, visible: masked_softmax(scores / scores.abs().mean((-2, -1), True), visible))


@leak("scores", **ATTENTION)
def keys_centered_over_the_sequence_after_a_nonlinear_score():
    """The scores pass a tanh after the mean over all keys is taken off, which the softmax does not undo."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax((scores - scores.mean(-1, keepdim=True)).tanh(), visible)

    return with_weights(weights)
