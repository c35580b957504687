"""Leaks at certain lengths and positions, and of the length itself.

B batch, T positions, C width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, Attention, Backbone, Mix, Positions, causal, next_token, steps
from tests.causality.corpus.entry import Trigger, leak

POSITIONS, ATTENTION, FFN = ({"place": place} for place in ("positions", "blocks.0.attn", "blocks.0.mlp"))


class UnmaskedAt(Attention):
    """Attention without a mask where `condition` holds for the length."""

    def __init__(self, condition: Callable[[int], bool]):
        super().__init__()
        self.condition = condition

    def visible(self, x: Tensor) -> Tensor:
        mask = super().visible(x)
        return torch.ones_like(mask) if self.condition(x.shape[1]) else mask


@leak("length", **ATTENTION, context_length=96, trigger=Trigger(length=80))
def unmasked_above_64():
    """Inputs of more than 64 tokens have no mask in the first layer."""
    return Backbone(attn=UnmaskedAt(lambda length: length > 64), context_length=96)


@leak("length", **ATTENTION, context_length=320, trigger=Trigger(length=300))
def unmasked_above_256():
    """Inputs of more than 256 tokens have no mask in the first layer."""
    return Backbone(attn=UnmaskedAt(lambda length: length > 256), context_length=320)


@leak("length", **ATTENTION, trigger=Trigger(length=40))
def unmasked_at_multiples_of_8():
    """Where the number of tokens is a multiple of 8, a fast path without the mask runs."""
    return Backbone(attn=UnmaskedAt(lambda length: length % 8 == 0))


@leak("length", **ATTENTION, context_length=200, trigger=Trigger(length=128))
def unmasked_at_multiples_of_64():
    """Where the number of tokens is a multiple of 64, a fast path without the mask runs."""
    return Backbone(attn=UnmaskedAt(lambda length: length % 64 == 0), context_length=200)


@leak("length", **ATTENTION, context_length=192, trigger=Trigger(length=120))
def unmasked_from_100_to_150():
    """Inputs of 100 to 150 tokens have no mask."""
    return Backbone(attn=UnmaskedAt(lambda length: 100 <= length <= 150), context_length=192)


@leak("length", **ATTENTION, context_length=97, trigger=Trigger(length=97))
def unmasked_at_the_full_context():
    """Only an input as long as the context has no mask."""
    return Backbone(attn=UnmaskedAt(lambda length: length == 97), context_length=97)


@leak("length", **ATTENTION, trigger=Trigger(length=37))
def unmasked_at_primes_above_30():
    """Lengths of 31, 37, 41, 43, 47, 53, 59 and 61 tokens have no mask."""
    return Backbone(attn=UnmaskedAt(lambda length: length in (31, 37, 41, 43, 47, 53, 59, 61)))


@leak("length", **ATTENTION, trigger=Trigger(length=3))
def unmasked_below_5():
    """Inputs of fewer than five tokens have no mask."""
    return Backbone(attn=UnmaskedAt(lambda length: length < 5))


@leak("length", **ATTENTION)
def unmasked_at_odd_lengths():
    """Odd numbers of tokens have no mask."""
    return Backbone(attn=UnmaskedAt(lambda length: length % 2 == 1))


@leak("length", **FFN)
def scaled_by_the_length():
    """The MLP is divided by the number of tokens of the input."""
    model = Backbone()
    model.block().mlp = Mix(lambda x: 8 * x / x.shape[1], model.block().mlp)
    return model


@leak("length", **ATTENTION)
def temperature_of_the_total_length():
    """The scores are scaled by the logarithm of the total number of tokens, not of those that the query sees."""

    class Scaled(Attention):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) * math.log(1 + k.shape[-2])

    return Backbone(attn=Scaled())


@leak("length", place="head")
def logits_scaled_by_the_length():
    """The temperature of the logits grows with the number of tokens."""
    model = Backbone()
    model.head = Mix(lambda x: x * (1 + x.shape[1] / 100), model.head)
    return model


@leak("length", **ATTENTION)
def window_of_half_the_length():
    """The window is half of the input, so a longer input lets the same query see more of its past."""
    return Backbone(attn=Attention(lambda query, key: (key <= query) & (2 * (query - key) <= len(key))))


@leak("length", place="blocks.1", trigger=Trigger(length=40, cut=20))
def layer_skipped_in_long_inputs():
    """The second block is skipped above 32 tokens, so earlier outputs change when the input grows."""
    model = Backbone()
    block = model.block(1)

    class Skipped(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x) if x.shape[1] <= 32 else x

    model.blocks[1] = Skipped()
    return model


class LengthDependentPositions(Positions):
    """Learned positions at indices that are a function of the embeddings (B, T, C)."""

    def __init__(self, index: Callable[[Tensor], Tensor]):
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return self.table[self.index(x)]


@leak("positions", **POSITIONS)
def positions_counted_from_the_end():
    """Position 0 is the last token, so each output shows how many tokens follow."""
    return Backbone(positions=LengthDependentPositions(lambda x: steps(x).flip(0)))


@leak("positions", **POSITIONS)
def positions_of_a_right_aligned_table():
    """The table is aligned with the last token, as for left-padded inputs."""
    return Backbone(positions=LengthDependentPositions(lambda x: steps(x) - x.shape[1]))


@leak("positions", **POSITIONS)
def positions_as_a_share_of_the_length():
    """The position is divided by the length of the input."""
    direction = torch.linspace(-1, 1, DIM)
    return Backbone(positions=Mix(lambda x: (steps(x) / x.shape[1])[:, None].to(x) * direction.to(x)))


@leak("positions", **POSITIONS)
def last_position_knows_that_it_is_last():
    """The last position has an embedding of its own, so an output shows whether a token follows."""

    class WithLast(Positions):
        def forward(self, x: Tensor) -> Tensor:
            last = steps(x) == x.shape[1] - 1
            return super().forward(x) + last[:, None] * self.table[0]

    return Backbone(positions=WithLast())


@leak("positions", **POSITIONS)
def parity_of_the_length():
    """Even and odd lengths add different constants, by which a token learns one bit of the future."""

    class WithParity(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + x.shape[1] % 2)

    return Backbone(positions=WithParity())


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary positions on (B, H, T, D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] / base ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Rotary(Attention):
    """Rotary positions whose base is a function of the length."""

    def __init__(self, base: Callable[[int], float]):
        super().__init__()
        self.base = base

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(*(rotated(part, self.base(k.shape[-2])) for part in (q, k)))


@leak("length", **ATTENTION)
def rotary_base_of_the_total_length():
    """Dynamic scaling computes one base from the total length, which changes earlier scores too."""
    return Backbone(attn=Rotary(lambda length: 100.0 * max(1.0, length / 8)))


@leak("length", **ATTENTION, trigger=Trigger(length=40, cut=20))
def rotary_base_switched_in_long_inputs():
    """Above 32 tokens a second base is used for all positions, as in models with short and long factors."""
    return Backbone(attn=Rotary(lambda length: 100.0 if length <= 32 else 10_000.0))


@leak("positions", **FFN, trigger=Trigger(length=48, cut=41))
def position_40_sees_the_next():
    """Only the state at position 40 is mixed with the one after it."""
    return Backbone(mlp=Mix(lambda x: x + (steps(x) == 40)[:, None] * next_token(x)))


@leak("positions", **ATTENTION)
def first_position_sees_all():
    """The first position, a kind of register, attends to the whole sequence, and the others to it."""
    return Backbone(attn=Attention(lambda query, key: causal(query, key) | (query == 0)))


@leak("positions", **FFN)
def second_to_last_position_sees_the_last():
    """The state before the last one is mixed with the last one, whatever the length."""
    return Backbone(mlp=Mix(lambda x: x + (steps(x) == x.shape[1] - 2)[:, None] * next_token(x)))


@leak("positions", **FFN, context_length=320, trigger=Trigger(length=280, cut=257))
def position_256_sees_the_next():
    """Position 256, the first one beyond a block of 256, is mixed with the one after it."""
    return Backbone(mlp=Mix(lambda x: x + (steps(x) == 256)[:, None] * next_token(x)), context_length=320)
