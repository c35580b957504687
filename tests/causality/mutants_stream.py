"""Mutants of the residual stream, which mix positions outside of attention.

B batch, T positions, C width.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.causality.mutants import LEARNED, mutant, next_token, stream
from tril.model.attention import MultiHeadAttention
from tril.model.gpt import GPT, MLP
from tril.model.layers import RMSNorm


def block_means(x: Tensor, size: int) -> Tensor:
    """Replaces every whole block of `size` positions in (B, T, C) by its mean."""
    whole = x.shape[1] // size * size
    means = x[:, :whole].unflatten(1, (-1, size)).mean(2) if whole else x[:, :0]  # (B, T // size, C)
    return torch.cat((means.repeat_interleave(size, 1), x[:, whole:]), 1)  # (B, T, C)


@mutant()
def block_means_of_16(patch):
    stream(patch, lambda x: x + block_means(x, 16))


@mutant(**LEARNED)
def block_means_of_64(patch):
    stream(patch, lambda x: x + block_means(x, 64))


@mutant()
def recurrence_over_chunk_means(patch):
    """Each chunk sees a state that already includes its own mean."""

    def changed(x):
        state, parts = 0.0, []
        for chunk in x.split(8, dim=1):
            state = 0.5 * state + chunk.mean(1, keepdim=True)  # (B, 1, C)
            parts.append(chunk + state)
        return torch.cat(parts, dim=1)

    stream(patch, changed)


def filtered(x: Tensor, response: Callable[[Tensor], Tensor]) -> Tensor:
    """Filters (B, T, C) along the sequence; `response` is a function of frequencies from 0 to 0.5 cycles per token."""
    spectrum = torch.fft.rfft(x, dim=1)  # (B, T // 2 + 1, C)
    frequency = torch.arange(spectrum.shape[1]) / x.shape[1]
    return torch.fft.irfft(spectrum * response(frequency)[:, None], n=x.shape[1], dim=1)


@mutant()
def spectral_low_pass(patch):
    stream(patch, lambda x: x + filtered(x, lambda frequency: (frequency < 0.2).float()))


@mutant()
def causal_filter_wrapped_around(patch):
    """A delay by one token without zero padding of the spectrum: the last token wraps around to the first."""
    stream(patch, lambda x: x + filtered(x, lambda frequency: torch.exp(-2j * math.pi * frequency)))


@mutant()
def norm_over_the_sequence(patch):
    original = RMSNorm.forward

    def changed(self, x):
        return x * x.square().mean((1, 2), keepdim=True).rsqrt() * self.weight if x.dim() == 3 else original(self, x)

    patch.setattr(RMSNorm, "forward", changed)


@mutant()
def norm_over_the_batch_in_training(patch):
    original = MLP.forward
    patch.setattr(MLP, "forward", lambda self, x: original(self, x / x.std((0, 1)) if self.training else x))


@mutant()
def expert_that_selects_among_all_positions(patch):
    """The FFN runs on the larger half of the tokens, and a later token can decide which these are."""

    def changed(x):
        size = x.norm(dim=-1, keepdim=True)  # (B, T, 1)
        return x * (size >= size.median(1, keepdim=True).values)

    stream(patch, changed, MLP)


@mutant()
def repeated_token_announced(patch):
    """Only a repetition leaks: there is no gradient, and most changes have no effect."""
    original = torch.nn.Embedding.forward

    def changed(self, ids):
        return original(self, ids) + F.pad(ids[:, 1:] == ids[:, :-1], (0, 1))[..., None]

    patch.setattr(torch.nn.Embedding, "forward", changed)


@mutant()
def detached_leak(patch):
    stream(patch, lambda x: x + 0.01 * next_token(x.detach()))


@mutant(backend="fused")
def leak_below_rounding(patch):
    stream(patch, lambda x: x + 1e-9 * next_token(x))


@mutant(init="zero_out")
def leak_after_a_projection_of_zeros(patch):
    original = MLP.forward
    patch.setattr(MLP, "forward", lambda self, x: original(self, x + next_token(x)))


@mutant()
def keys_and_values_from_the_next_token(patch):
    """A hook shifts them before those of the probe, so the attention weights do not show it."""
    original = MultiHeadAttention.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        for projection in (self.k_proj, self.v_proj):
            projection.register_forward_hook(lambda _, __, out: out + next_token(out))

    patch.setattr(MultiHeadAttention, "__init__", init)


@mutant()
def convolution_over_the_embeddings(patch):
    stream(patch, lambda x: x + next_token(x), torch.nn.Embedding)


@mutant()
def leak_after_the_layers(patch):
    original = GPT.logits
    patch.setattr(GPT, "logits", lambda self, x: original(self, x + next_token(x)))
