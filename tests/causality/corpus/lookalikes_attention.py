"""Correct attention: ways to share heads, to mask and to normalize.

B batch, T queries, S keys, H query heads, D head size, C width.
"""

import math
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, N_HEADS, Attention, Backbone, causal, masked_softmax, steps
from tests.causality.corpus.entry import correct


def with_weights(weights: Callable[[Tensor, Tensor], Tensor], **options) -> Backbone:
    return Backbone(attn=Attention(weights=weights, **options))


@correct("look-alike: attention")
def causal_attention():
    """The unchanged backbone: two causal layers with learned positions."""
    return Backbone()


@correct("look-alike: attention")
def grouped_query_attention():
    """Two key/value heads for four query heads."""
    return Backbone(attn=Attention(n_kv_heads=2))


@correct("look-alike: attention")
def multi_query_attention():
    """One key/value head for all query heads."""
    return Backbone(attn=Attention(n_kv_heads=1))


@correct("look-alike: attention")
def multi_head_latent_attention():
    """Keys and values are expanded from a latent of 4 numbers for each token."""

    class Latent(Attention):
        def __init__(self):
            super().__init__()
            latent = nn.Linear(DIM, 4)
            self.k_proj, self.v_proj = (nn.Sequential(latent, nn.Linear(4, DIM)) for _ in range(2))

    return Backbone(attn=Latent())


@correct("look-alike: attention")
def fused_attention():
    """torch's scaled_dot_product_attention with its own causal flag."""

    class Fused(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.merge(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))

    return Backbone(attn=Fused())


@correct("look-alike: attention")
def torch_multi_head_attention():
    """torch.nn.MultiheadAttention, whose boolean mask is True where a key is hidden."""

    class Torch(nn.Module):
        def __init__(self):
            super().__init__()
            self.mha = nn.MultiheadAttention(DIM, N_HEADS, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            hidden = ~causal(steps(x)[:, None], steps(x))
            return self.mha(x, x, x, attn_mask=hidden, need_weights=False)[0]

    return Backbone(attn=Torch())


@correct("look-alike: attention")
def softmax_plus_one():
    """A one in the denominator lets a head attend to nothing; it is scaled by the largest visible score."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        largest = scores.masked_fill(~visible, -math.inf).amax(-1, keepdim=True).clamp(min=0)
        powers = (scores - largest).exp() * visible
        return powers / ((-largest).exp() + powers.sum(-1, keepdim=True))

    return with_weights(weights)


@correct("look-alike: attention")
def largest_visible_scores_chosen():
    """Each query keeps the four largest scores among the keys that it may see."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        hidden = scores.masked_fill(~visible, -math.inf)
        least = hidden.topk(min(4, scores.shape[-1]), -1).values[..., -1:]
        return masked_softmax(scores, visible & (hidden >= least))

    return with_weights(weights)


@correct("look-alike: attention")
def scores_capped_by_a_tanh():
    """The scores pass a tanh before the mask."""
    return with_weights(lambda scores, visible: masked_softmax(5 * (scores / 5).tanh(), visible), scale=2.0)


@correct("look-alike: attention")
def difference_of_two_softmaxes():
    """Half of the weights are taken off by those of another head, both under the mask."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        masked = masked_softmax(scores, visible)
        return masked - 0.5 * masked.roll(1, 1)

    return with_weights(weights)


@correct("look-alike: attention")
def finite_mask_value_far_below_the_scores():
    """The mask adds -1e4 to scores of about 1, whose exponentials are 0 to the bit."""
    return with_weights(lambda scores, visible: (scores - 1e4 * ~visible).softmax(-1))


@correct("look-alike: attention")
def normalized_queries_and_keys():
    """Queries and keys are normalized for each token and head."""

    class Normalized(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(F.normalize(q, dim=-1), F.normalize(k, dim=-1)) * 10

    return Backbone(attn=Normalized())
