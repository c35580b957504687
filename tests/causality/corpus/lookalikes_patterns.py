"""Correct positions, and patterns of attention that are judged by their own `expected`.

T queries, S keys, H query heads, D head size, C width.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, N_HEADS, Attention, Backbone, Mix, masked_softmax, steps, window
from tests.causality.corpus.entry import correct
from tests.causality.corpus.length_leaks import rotated


def pattern(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[int], Tensor]:
    """T -> (T, T) of a rule of positions."""
    return lambda length: rule(torch.arange(length)[:, None], torch.arange(length)).bool()


@correct("look-alike: positions")
def sinusoidal_positions():
    """Sines and cosines of the position from the start."""

    def table(x: Tensor) -> Tensor:
        angles = steps(x)[:, None] / 1000 ** (torch.arange(DIM // 2, device=x.device) / DIM)
        return torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype)

    return Backbone(positions=Mix(table))


@correct("look-alike: positions")
def no_positions():
    """Attention without positions, which the causal mask still orders."""
    return Backbone(positions=Mix(torch.zeros_like))


@correct("look-alike: positions")
def alibi():
    """A penalty that grows with the distance into the past, with a slope for each head, under the mask."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        position = torch.arange(scores.shape[-1], device=scores.device)
        slopes = 2.0 ** -torch.arange(1, N_HEADS + 1, device=scores.device)[:, None, None]
        return masked_softmax(scores - slopes * (position[:, None] - position), visible)

    return Backbone(attn=Attention(weights=weights))


class Rotary(Attention):
    """Rotary positions on queries and keys."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(rotated(q, 100.0), rotated(k, 100.0))


@correct("look-alike: positions")
def rotary_positions():
    """Queries and keys are rotated by their position."""
    return Backbone(attn=Rotary(), positions=Mix(torch.zeros_like))


@correct("look-alike: positions")
def rotary_scaled_by_the_position():
    """Positions above 32 are compressed, as a function of the position and not of the length."""

    class Scaled(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            n = k.shape[-2]
            position = torch.arange(n, device=k.device, dtype=k.dtype)
            position = torch.where(position < 32, position, 32 + (position - 32) / 4)
            angles = position[:, None] / 100 ** torch.arange(0, 1, 2 / k.shape[-1], device=k.device, dtype=k.dtype)
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn for part in (q, k))
            return super().scores(*(torch.view_as_real(part).flatten(-2) for part in (q, k)))

    return Backbone(attn=Scaled())


@correct("look-alike: positions")
def temperature_of_the_visible_length():
    """The scores of each query are scaled by the logarithm of the number of keys that it sees."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax(scores * visible.sum(-1, keepdim=True).add(1).log().to(scores.dtype), visible)

    return Backbone(attn=Attention(weights=weights))


@correct("look-alike: positions")
def learned_bias_by_distance():
    """A learned bias for each head and bucket of distances, as in T5."""

    class Relative(Attention):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(N_HEADS, 8))

        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            position = torch.arange(k.shape[-2], device=k.device)
            distance = (position[:, None] - position).clamp(min=0)
            return super().scores(q, k) + self.table[:, (1 + distance).log2().long()]

    return Backbone(attn=Relative())


@correct("look-alike: attention pattern", expected=window(8))
def sliding_window():
    """One layer with a window of 8 keys."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) & (key > query - 8)), n_layers=1)


@correct("look-alike: attention pattern", expected=window(15))
def two_layers_of_sliding_windows():
    """Two layers with windows of 8 see 15 positions together."""
    model = Backbone()
    for block in model.blocks:
        block.attn = Attention(lambda query, key: (key <= query) & (key > query - 8))
    return model


@correct("look-alike: attention pattern")
def window_below_a_full_layer():
    """A window of 8 in the first layer and full attention in the second see all of the past."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) & (key > query - 8)))


def _sinks(query, key):
    return (key <= query) & ((key < 4) | (key > query - 8))


@correct("look-alike: attention pattern", expected=pattern(_sinks))
def attention_sinks_and_a_window():
    """The first four tokens stay visible next to a window of 8."""
    return Backbone(attn=Attention(_sinks), n_layers=1)


def _strided(query, key):
    return (key <= query) & ((query - key < 4) | ((query - key) % 4 == 0))


@correct("look-alike: attention pattern", expected=pattern(_strided))
def strided_attention():
    """The nearest four keys, and every fourth one before them."""
    return Backbone(attn=Attention(_strided), n_layers=1)


def _local(query, key):
    return (key <= query) & (key // 8 == query // 8)


@correct("look-alike: attention pattern", expected=pattern(_local))
def block_local_attention():
    """Each block of 8 attends causally to itself alone."""
    return Backbone(attn=Attention(_local), n_layers=1)


def _dilated(query, key):
    return (key <= query) & (query - key < 16) & ((query - key) % 2 == 0)


@correct("look-alike: attention pattern", expected=pattern(_dilated))
def dilated_window():
    """Every second key of a window of 16."""
    return Backbone(attn=Attention(_dilated), n_layers=1)


def _prefix(query, key):
    return (key <= query) | (key < 8) & (query < 8)


@correct("look-alike: attention pattern", expected=pattern(_prefix))
def prefix_language_model():
    """The first 8 tokens see each other; all later ones are causal."""
    model = Backbone()
    for block in model.blocks:
        block.attn = Attention(_prefix)
    return model


@correct("look-alike: attention pattern", expected=pattern(lambda query, key: key <= query + 2))
def two_tokens_of_lookahead():
    """A streaming model that may see two tokens ahead, as its pattern says."""
    return Backbone(attn=Attention(lambda query, key: key <= query + 2), n_layers=1)


@correct("look-alike: attention pattern", expected=pattern(lambda query, key: (key >= 0) & (query >= 0)))
def encoder():
    """An encoder whose pattern says that all may see all."""
    return Backbone(attn=Attention(lambda query, key: (key >= 0) & (query >= 0)))


@correct("look-alike: attention pattern", expected=pattern(lambda query, key: key == query))
def each_token_alone():
    """A bigram model: each output depends on its own token."""
    return Backbone(attn=Mix(lambda x: x), n_layers=1)
