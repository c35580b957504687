"""Mutants of one path among several: a single precision, training, compilation.

B batch, T positions, H heads, G key/value heads, S keys, D head size, V vocabulary.
"""

import torch
from torch import Tensor

from tests.causality.mutants import kernel, mutant, next_token, stream


def scaled_by_last_key(out: Tensor, k: Tensor) -> Tensor:
    """Multiplies outputs (B, H, T, D) by a factor from the last key (B, G, S, D); a weight of 0 stays 0."""
    return out * (1 + 0.5 * k[:, :1, -1:, :1].detach().tanh())


@mutant(backend="fused")
def leak_of_the_float32_kernel_only(patch):
    def changed(original, q, k, *rest):
        out, weights = original(q, k, *rest)
        return scaled_by_last_key(out, k) if q.dtype == torch.float32 else out, weights

    kernel(patch, changed, "fused")


@mutant(backend="fused", precision="bf16-mixed")
def leak_of_the_bf16_kernel_only(patch):
    def changed(original, q, k, *rest):
        out, weights = original(q, k, *rest)
        return scaled_by_last_key(out, k) if q.dtype == torch.bfloat16 else out, weights

    kernel(patch, changed, "fused")


@mutant()
def detached_leak_where_gradients_are_on(patch):
    """torch has other kernels for training, which sampling does not use."""
    stream(patch, lambda x: x + 0.1 * next_token(x.detach()) if torch.is_grad_enabled() else x)


@mutant()
def leak_of_the_compiled_model_only(patch):
    def compiled(model, **options):
        return lambda ids, **rest: (lambda logits: logits + 0.1 * next_token(logits))(model(ids, **rest))

    patch.setattr(torch, "compile", compiled)
