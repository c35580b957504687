"""Mutants of what lies around attention: the residual stream, training, precision, compilation.

B batch, T positions, C width, H heads, G key/value heads, D head size, V vocabulary.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.model.causality.mutants import CATALOGUE, NEXT, kernel, mutant
from tests.model.causality.mutants_of_batches import LEARNED, next_one, stream
from tril.model.attention import MultiHeadAttention
from tril.model.gpt import GPT, MLP
from tril.model.norm import RMSNorm

__all__ = ["CATALOGUE"]  # complete, with the mutants of all files


# The residual stream


def of_blocks(x: Tensor, size: int) -> Tensor:
    """Of (B, T, C) in every whole block of `size` positions its mean."""
    whole = x.shape[1] // size * size
    means = x[:, :whole].unflatten(1, (-1, size)).mean(2) if whole else x[:, :0]  # (B, T // size, C)
    return torch.cat((means.repeat_interleave(size, 1), x[:, whole:]), 1)  # (B, T, C)


@mutant("no future", where=NEXT)
def block_means_of_16(patch):
    stream(patch, lambda x: x + of_blocks(x, 16))


@mutant("no future", where=NEXT, **LEARNED)
def block_means_of_64(patch):
    stream(patch, lambda x: x + of_blocks(x, 64))


@mutant("no future", where=NEXT)
def recurrence_over_chunk_means(patch):
    """Each chunk sees the state that already holds its own mean."""

    def changed(x):
        state, parts = 0.0, []
        for chunk in x.split(8, dim=1):
            state = 0.5 * state + chunk.mean(1, keepdim=True)  # (B, 1, C)
            parts.append(chunk + state)
        return torch.cat(parts, dim=1)

    stream(patch, changed)


def filtered(x: Tensor, response: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, T, C) through a filter along the sequence, given at frequencies of 0 ... 0.5 cycles a token."""
    spectrum = torch.fft.rfft(x, dim=1)  # (B, T // 2 + 1, C)
    frequency = torch.arange(spectrum.shape[1]) / x.shape[1]
    return torch.fft.irfft(spectrum * response(frequency)[:, None], n=x.shape[1], dim=1)


@mutant("no future", where=NEXT)
def spectral_low_pass(patch):
    stream(patch, lambda x: x + filtered(x, lambda frequency: (frequency < 0.2).float()))


@mutant("no future", where=NEXT)
def causal_filter_wrapped_around(patch):
    """A delay by one token, but the spectrum was not padded with zeros: the last comes in before the first."""
    stream(patch, lambda x: x + filtered(x, lambda frequency: torch.exp(-2j * math.pi * frequency)))


@mutant("no future", where=NEXT)
def norm_over_the_sequence(patch):
    original = RMSNorm.forward

    def changed(self, x):
        return x * x.square().mean((1, 2), keepdim=True).rsqrt() * self.weight if x.dim() == 3 else original(self, x)

    patch.setattr(RMSNorm, "forward", changed)


@mutant("no future", "rows", where={"no future": "dropout=True", "rows": "dropout=True"})
def norm_over_the_batch_in_training(patch):
    original = MLP.forward
    patch.setattr(MLP, "forward", lambda self, x: original(self, x / x.std((0, 1)) if self.training else x))


@mutant("no future")
def expert_that_chooses_among_all_positions(patch):
    """The FFN works for the larger half of the tokens: which these are, a later one decides."""

    def changed(x):
        size = x.norm(dim=-1, keepdim=True)  # (B, T, 1)
        return x * (size >= size.median(1, keepdim=True).values)

    stream(patch, changed, MLP)


@mutant("no future", "canary")
def repeated_token_announced(patch):
    """Nothing else is seen coming: there is no gradient, and most changes have no effect."""
    original = torch.nn.Embedding.forward
    announced = lambda self, ids: original(self, ids) + F.pad(ids[:, 1:] == ids[:, :-1], (0, 1))[..., None]
    patch.setattr(torch.nn.Embedding, "forward", announced)


@mutant("no future", where={"no future": "by perturbation: query 0 changes with key 1, first in layer 0"})
def detached_leak(patch):
    stream(patch, lambda x: x + 0.01 * next_one(x.detach()))


@mutant("no future", where={"no future": "by gradient: query 0 has a gradient with respect to key 1 "}, backend="fused")
def leak_below_rounding(patch):
    stream(patch, lambda x: x + 1e-9 * next_one(x))


@mutant("no future", where=NEXT, init="zero_out")
def leak_behind_a_projection_of_zeros(patch):
    original = MLP.forward
    patch.setattr(MLP, "forward", lambda self, x: original(self, x + next_one(x)))


@mutant("no future", where=NEXT)
def keys_and_values_from_the_next_token(patch):
    split = MultiHeadAttention._split  # behind the projections, where the weights do not show it
    patch.setattr(
        MultiHeadAttention, "_split", lambda self, x, n: split(self, x if n == self.n_heads else x + next_one(x), n)
    )


@mutant("no future", where={"no future": "query 0 changes with key 1, before the layers"})
def convolution_over_the_embeddings(patch):
    stream(patch, lambda x: x + next_one(x), torch.nn.Embedding)


@mutant("no future", where={"no future": "query 0 changes with key 1, behind the layers"})
def leak_behind_the_layers(patch):
    original = GPT.logits
    patch.setattr(GPT, "logits", lambda self, x: original(self, x + next_one(x)))


# One path among several: another precision, training, compilation


def louder(out: Tensor, k: Tensor) -> Tensor:
    """Each output (B, H, T, D) times a factor from the newest key (B, G, S, D); a weight of 0 stays 0, and there is no gradient."""
    return out * (1 + 0.5 * k[:, :1, -1:, :1].detach().tanh())


@mutant("attention", where={"attention": "layer 0, head 0, query 0, key 0:"}, backend="fused")
def leak_of_the_float32_kernel_alone(patch):
    def changed(original, q, k, *rest):
        return louder(original(q, k, *rest), k) if q.dtype == torch.float32 else original(q, k, *rest)

    kernel(patch, changed, "fused")


@mutant("no future", backend="fused", precision="bf16-mixed")
def leak_of_the_bf16_kernel_alone(patch):
    def changed(original, q, k, *rest):
        return louder(original(q, k, *rest), k) if q.dtype == torch.bfloat16 else original(q, k, *rest)

    kernel(patch, changed, "fused")


@mutant("no future")
def detached_leak_where_gradients_are_on(patch):
    """torch picks another kernel where a gradient is asked for, so training has one that sampling has not."""
    stream(patch, lambda x: x + 0.1 * next_one(x.detach()) if torch.is_grad_enabled() else x)


@mutant("no future", where={"no future": "compiled=True"})
def leak_of_the_compiled_model_alone(patch):
    def compiled(model, **options):
        return lambda ids, **rest: (lambda logits: logits + 0.1 * next_one(logits))(model(ids, **rest))

    patch.setattr(torch, "compile", compiled)


@mutant("all of the past", where={"all of the past": "compiled=True"})
def compiled_model_without_its_past(patch):
    def compiled(model, **options):
        return lambda ids: model(ids.reshape(-1, 1)).view(*ids.shape, -1)  # every token alone

    patch.setattr(torch, "compile", compiled)
