"""Leaks of certain modes and precisions: training, gradients, bf16.

B batch, T positions, C width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Attention, Backbone, Mix, next_token, steps
from tests.causality.corpus.entry import Trigger, leak

ATTENTION, FFN = {"place": "blocks.0.attn"}, {"place": "blocks.0.mlp"}


class UnmaskedIf(Attention):
    """Attention without a mask where `condition(self, x)` holds."""

    def __init__(self, condition):
        super().__init__()
        self.condition = condition

    def visible(self, x: Tensor) -> Tensor:
        return super().visible(x) | torch.tensor(bool(self.condition(self, x)), device=x.device)


def unmasked_if(condition, **options) -> Backbone:
    return Backbone(attn=UnmaskedIf(condition), **options)


@leak("training mode", **ATTENTION, trigger=Trigger(training=True))
def unmasked_in_training():
    """In training mode the first layer has no mask."""
    return unmasked_if(lambda self, x: self.training)


@leak("training mode", **ATTENTION, trigger=Trigger(training=True, length=48))
def unmasked_in_training_above_37():
    """In training mode, inputs of more than 37 tokens have no mask."""
    return unmasked_if(lambda self, x: self.training and x.shape[1] > 37)


@leak("training mode", **ATTENTION, trigger=Trigger(training=False))
def unmasked_in_evaluation():
    """In evaluation mode the first layer has no mask, so only the validation loss is wrong."""
    return unmasked_if(lambda self, x: not self.training)


@leak("training mode", place="blocks.0.norm2", trigger=Trigger(training=True))
def batch_norm_in_training():
    """Batch norm takes its statistics over all positions of the batch in training, and stored ones in evaluation."""
    model = Backbone()
    model.block().norm2 = nn.Sequential(Mix(lambda x: x.mT), nn.BatchNorm1d(DIM), Mix(lambda x: x.mT))
    return model


class TrainingOnly(nn.Module):
    """`function` of the input in training mode, then an MLP."""

    def __init__(self, function):
        super().__init__()
        self.function, self.mlp = function, MLP()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.function(x) if self.training else x)


@leak("training mode", **FFN, trigger=Trigger(training=True))
def noise_scaled_by_the_sequence():
    """In training mode the noise has the standard deviation of the whole sequence."""
    return Backbone(mlp=TrainingOnly(lambda x: x + 0.1 * x.std() * torch.randn_like(x)))


@leak("training mode", **FFN, trigger=Trigger(training=True))
def mixed_with_a_random_later_token():
    """In training mode each position is mixed with one of the sequence that is drawn at random."""

    def mixed(x: Tensor) -> Tensor:
        return x + 0.2 * x[:, torch.randperm(x.shape[1], device=x.device)]

    return Backbone(mlp=TrainingOnly(mixed))


@leak("training mode", **FFN, trigger=Trigger(training=True))
def layer_dropped_by_the_sequence():
    """In training mode the MLP is skipped where the last token of the row has a positive first channel."""
    return Backbone(mlp=TrainingOnly(lambda x: x * (x[:, -1:, :1] > 0)))


@leak("gradient mode", **ATTENTION, trigger=Trigger(no_grad=True))
def unmasked_without_gradients():
    """The kernel for inference, chosen where gradients are off, has no mask."""
    return unmasked_if(lambda self, x: not torch.is_grad_enabled())


@leak("gradient mode", **ATTENTION, trigger=Trigger(no_grad=False))
def unmasked_with_gradients():
    """The kernel for training, chosen where gradients are on, has no mask, also in evaluation mode."""
    return unmasked_if(lambda self, x: torch.is_grad_enabled())


@leak("gradient mode", **FFN)
def detached_next_token():
    """The next token is added without its gradient, so that only changed inputs show it."""
    return Backbone(mlp=Mix(lambda x: x + 0.1 * next_token(x.detach())))


@leak("gradient only", **FFN, trigger=Trigger(gradient_only=True))
def straight_through_next_token():
    """The outputs are causal, and the gradient flows into the next token (straight-through estimator)."""
    return Backbone(mlp=Mix(lambda x: x + (next_token(x) - next_token(x).detach())))


@leak("gradient only", **ATTENTION, trigger=Trigger(gradient_only=True))
def straight_through_quantization_by_all_tokens():
    """A step function hides a mean over the sequence from the outputs, and its replaced gradient does not."""

    def quantized(x: Tensor) -> Tensor:
        soft = x + 0.1 * x.mean(1, True)
        return soft + (x.round() - soft).detach()

    return Backbone(attn=Mix(quantized))


@leak("precision", **ATTENTION, trigger=Trigger(dtype=torch.bfloat16))
def unmasked_in_bfloat16():
    """The kernel for bf16 weights has no mask."""
    return unmasked_if(lambda self, x: x.dtype == torch.bfloat16)


@leak("precision", **ATTENTION, trigger=Trigger(autocast=True))
def unmasked_under_autocast():
    """Under bf16 autocast a kernel without the mask is chosen."""
    return unmasked_if(lambda self, x: torch.is_autocast_enabled(x.device.type))


@leak("precision", **ATTENTION, trigger=Trigger(dtype=torch.float32))
def unmasked_in_float32():
    """Only float32 has no mask, so that a comparison in float64 finds nothing."""
    return unmasked_if(lambda self, x: x.dtype == torch.float32)


@leak("precision", **ATTENTION, context_length=320, trigger=Trigger(dtype=torch.bfloat16, length=320, cut=257))
def positions_compared_in_the_dtype_of_the_model():
    """Positions are numbers of the model's dtype, and bf16 rounds 257 to 256, which makes them equal."""

    class Rounded(Attention):
        def visible(self, x: Tensor) -> Tensor:
            position = steps(x).to(x.dtype)
            return position <= position[:, None]

    return Backbone(attn=Rounded(), context_length=320)


@leak("precision", **FFN, trigger=Trigger(dtype=torch.bfloat16))
def normalized_over_time_in_bfloat16():
    """In bf16 a fused norm runs over the flattened sequence."""

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[1:]) if x.dtype == torch.bfloat16 else F.layer_norm(x, x.shape[2:])

    return Backbone(mlp=nn.Sequential(Mix(norm), MLP()))
