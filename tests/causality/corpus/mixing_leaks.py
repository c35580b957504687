"""Leaks of layers that mix positions outside of attention: normalization, pooling, convolution, shifts, quantization.

B batch, T positions, C width.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Attention, Backbone, Mix, Positions, next_token
from tests.causality.corpus.entry import VOCAB_SIZE, leak

FFN = {"place": "blocks.0.mlp"}


def before_mlp(function: Callable[[Tensor], Tensor]) -> Backbone:
    """A backbone whose first MLP gets `function` of its input."""
    return Backbone(mlp=nn.Sequential(Mix(function), MLP()))


@leak("normalization over time", **FFN)
def norm_over_time():
    """Each channel is standardized over all positions (instance norm)."""
    return before_mlp(lambda x: (x - x.mean(1, True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt())


@leak("normalization over time", place="blocks.0.norm2")
def group_norm_over_time_and_channels():
    """Group norm on (B, C, T) takes its statistics over the whole sequence."""
    model = Backbone()
    group = nn.GroupNorm(4, DIM)
    model.block().norm2 = nn.Sequential(Mix(lambda x: x.mT), group, Mix(lambda x: x.mT))
    return model


@leak("normalization over time", **FFN)
def rms_over_the_sequence():
    """The root mean square is taken over positions and channels."""
    return before_mlp(lambda x: x * (x.square().mean((1, 2), keepdim=True) + 1e-5).rsqrt())


@leak("normalization over time", place="norm")
def final_norm_over_time():
    """The norm before the head divides by the standard deviation over all positions."""
    return Backbone(norm=Mix(lambda x: x / (x.std((1, 2), keepdim=True, unbiased=False) + 0.1)))


@leak("normalization over time", **FFN)
def min_max_scaling_over_time():
    """Each channel is scaled by its largest and smallest value in the sequence."""
    return before_mlp(lambda x: (x - x.amin(1, True)) / (x.amax(1, True) - x.amin(1, True) + 1e-3))


@leak("normalization over time", **FFN)
def gate_by_a_softmax_over_time():
    """A gate is a softmax over positions, so all later ones are in its denominator."""
    return before_mlp(lambda x: x * x.softmax(1) * 8)


@leak("normalization over time", place="embed")
def embeddings_centered_over_the_sequence():
    """The mean of all embeddings of the sequence is taken off each of them."""
    return Backbone(embed=Mix(lambda x: x - x.mean(1, True), nn.Embedding(VOCAB_SIZE, DIM)))


@leak("normalization over time", place="head")
def logits_standardized_over_time():
    """Each logit is divided by its standard deviation over the sequence."""
    return Backbone(head=Mix(lambda x: x / (x.std(1, keepdim=True, unbiased=False) + 0.1), nn.Linear(DIM, VOCAB_SIZE)))


@leak("pooling over the sequence", **FFN)
def mean_of_the_sequence_added():
    """Every position gets the mean of all positions."""
    return before_mlp(lambda x: x + x.mean(1, True))


@leak("pooling over the sequence", **FFN)
def maximum_of_the_sequence_added():
    """Every position gets the maximum of each channel over all positions."""
    return before_mlp(lambda x: x + x.amax(1, True))


@leak("pooling over the sequence", **FFN)
def squeeze_and_excitation():
    """The gate of each channel comes from the mean over all positions."""
    return before_mlp(lambda x: x * (4 * x.mean(1, True)).sigmoid())


@leak("pooling over the sequence", **FFN)
def means_of_blocks_of_eight():
    """Each position gets the mean of its block of 8 positions, later ones included; the rest gets its own mean."""
    return before_mlp(
        lambda x: x + torch.cat([part.mean(1, True).expand_as(part) for part in x.split(8, dim=1)], dim=1)
    )


@leak("pooling over the sequence", **FFN)
def adaptive_pooling_to_four_positions():
    """The sequence is pooled to four positions and stretched to its length again."""
    return before_mlp(lambda x: x + F.interpolate(F.adaptive_avg_pool1d(x.mT, 4), size=x.shape[1]).mT)


@leak("pooling over the sequence", place="blocks.1.mlp")
def last_position_added_to_all():
    """The state of the last position, as a classifier uses it, is added to every position."""
    return Backbone(mlp=nn.Sequential(Mix(lambda x: x + x[:, -1:]), MLP()), layer=1)


@leak("pooling over the sequence", **FFN)
def median_of_the_sequence_as_a_threshold():
    """Channels below the median over all positions are set to 0."""
    return before_mlp(lambda x: x * (x >= x.median(1, True).values))


class Convolution(nn.Module):
    """A depthwise convolution over (B, T, C) with the given padding on the left and on the right."""

    def __init__(self, kernel_size: int, left: int, right: int, dilation: int = 1):
        super().__init__()
        self.padding = (left, right)
        self.conv = nn.Conv1d(DIM, DIM, kernel_size, groups=DIM, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, self.padding)).mT


@leak("convolution", **FFN)
def symmetric_convolution():
    """A kernel of 3 is centered on its position."""
    return Backbone(mlp=Convolution(3, 1, 1))


@leak("convolution", **FFN)
def convolution_padded_one_too_little():
    """A kernel of 4 is padded by 2 on the left and 1 on the right."""
    return Backbone(mlp=Convolution(4, 2, 1))


@leak("convolution", **FFN)
def convolution_padded_on_the_right():
    """The padding stands on the wrong side, so each position sees the next three."""
    return Backbone(mlp=Convolution(4, 0, 3))


@leak("convolution", **FFN)
def dilated_convolution_padded_without_its_dilation():
    """A kernel of 3 with dilation 4 needs 8 positions of padding on the left and has 2, the others on the right."""
    return Backbone(mlp=Convolution(3, 2, 6, dilation=4))


@leak("convolution", place="embed")
def convolution_over_the_embeddings():
    """A convolution with same padding follows the embedding."""
    return Backbone(embed=nn.Sequential(nn.Embedding(VOCAB_SIZE, DIM), Convolution(5, 2, 2)))


class FFTConvolution(nn.Module):
    """A long convolution through the frequency domain.

    Args:
        padding: how many times its own length the input is padded to.
    """

    def __init__(self, padding: int, context_length: int = 64):
        super().__init__()
        self.padding = padding
        decay = torch.linspace(0, -3, context_length).exp()[:, None]
        self.filter = nn.Parameter(decay * torch.randn(context_length, DIM) / 2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        size = self.padding * length
        spectrum = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(self.filter[:length], size, dim=0)
        return torch.fft.irfft(spectrum, size, dim=1)[:, :length]


@leak("convolution", **FFN)
def fft_convolution_without_zero_padding():
    """The product of the spectra is a circular convolution: the last tokens wrap around to the first positions."""
    return Backbone(mlp=FFTConvolution(1))


@leak("convolution", **FFN)
def pooled_and_stretched_again():
    """Pairs of positions are averaged, transformed and repeated, as in a U-Net."""

    def halved(x: Tensor) -> Tensor:
        pairs = F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2)).mean(2)  # (B, T / 2, C)
        return pairs.repeat_interleave(2, 1)[:, : x.shape[1]]

    return before_mlp(halved)


@leak("token shift", **FFN)
def token_shift_in_the_wrong_direction():
    """Each position is mixed with the next one instead of the one before."""
    return before_mlp(lambda x: 0.5 * (x + next_token(x)))


@leak("token shift", **FFN)
def token_shift_by_a_roll():
    """The shift wraps around, so the first position gets the last one."""
    return before_mlp(lambda x: 0.5 * (x + x.roll(1, 1)))


@leak("token shift", **FFN)
def half_of_the_channels_shifted_back():
    """The first half of the channels comes from the position before, the second from the one after."""

    def shifted(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([F.pad(first, (0, 0, 1, -1)), next_token(second)], -1)

    return before_mlp(shifted)


@leak("token shift", place="positions")
def next_embedding_added_with_the_positions():
    """The embedding of the next token is added together with the positions."""

    class WithNext(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * next_token(x)

    return Backbone(positions=WithNext())


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """8-bit numbers, with the gradient of the identity."""
    quantized = (x / scale * 127).round().clamp(-127, 127) / 127 * scale
    return x + (quantized - x).detach()


@leak("quantization scale over the sequence", **FFN)
def quantization_by_the_largest_value():
    """The 8-bit scale is the largest value of the whole sequence."""
    return before_mlp(lambda x: rounded(x, x.abs().amax((1, 2), keepdim=True)))


@leak("quantization scale over the sequence", **FFN)
def quantization_by_channel():
    """The 8-bit scale of each channel is its largest value in the sequence."""
    return before_mlp(lambda x: rounded(x, x.abs().amax(1, True)))


@leak("quantization scale over the sequence", place="blocks.0.attn.k_proj")
def quantized_keys():
    """The keys are rounded to 8 bits with one scale for the sequence, as a quantized cache would at once."""
    attn = Attention()
    attn.k_proj = Mix(lambda k: rounded(k, k.abs().amax((1, 2), keepdim=True)), attn.k_proj)
    return Backbone(attn=attn)


@leak("quantization scale over the sequence", **FFN)
def quantization_zero_point():
    """The zero point is the smallest value of the sequence."""

    def quantized(x: Tensor) -> Tensor:
        low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
        return low + rounded(x - low, high - low)

    return before_mlp(quantized)
