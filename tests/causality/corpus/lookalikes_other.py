"""Correct models that look suspicious: routing, norms over time, numerics, training noise.

B batch, T positions, C width, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Attention, Backbone, Mix, Positions, masked_softmax, steps
from tests.causality.corpus.entry import correct
from tests.causality.corpus.routing_leaks import ChosenDepth, Experts, best, top_expert


def before_mlp(function) -> Backbone:
    return Backbone(mlp=nn.Sequential(Mix(function), MLP()))


@correct("look-alike: mixture of experts")
def token_choice_top_1():
    """Each token takes its best expert."""
    return Backbone(mlp=Experts(lambda scores: scores.softmax(-1) * top_expert(scores)))


@correct("look-alike: mixture of experts")
def token_choice_top_2():
    """Each token takes its two best experts, with weights that add up to 1."""
    return Backbone(mlp=Experts(lambda scores: masked_softmax(scores, best(scores, 0.5, dim=-1))))


@correct("look-alike: mixture of experts")
def token_choice_with_noise_in_training():
    """Noise is added to the router's scores in training."""

    class Noisy(Experts):
        def forward(self, x: Tensor) -> Tensor:
            noise = 0.1 * self.training
            self.choose = lambda scores: top_expert(scores + noise * torch.randn_like(scores))
            return super().forward(x)

    return Backbone(mlp=Noisy(top_expert))


@correct("look-alike: mixture of experts")
def capacity_in_the_order_of_the_tokens():
    """An expert takes the first six tokens that choose it, so only earlier tokens displace a token."""

    def choose(scores: Tensor) -> Tensor:
        chosen = top_expert(scores)
        return chosen * (chosen.cumsum(1) <= 6)

    return Backbone(mlp=Experts(choose))


@correct("look-alike: mixture of experts")
def depth_by_a_threshold():
    """A token passes the MLP if its own score is above 0."""
    return Backbone(mlp=ChosenDepth(lambda scores: scores > 0))


@correct("look-alike: normalization")
def cumulative_norm_over_time():
    """Each position is standardized by the mean and the variance of the positions up to it."""

    def norm(x: Tensor) -> Tensor:
        count = (1 + steps(x))[:, None]
        mean, square = x.cumsum(1) / count, x.square().cumsum(1) / count
        return (x - mean) / (square - mean.square() + 0.01).sqrt()

    return before_mlp(norm)


@correct("look-alike: normalization")
def cumulative_maximum():
    """Each channel is the largest value up to its position."""
    return before_mlp(lambda x: x.cummax(1).values)


@correct("look-alike: normalization")
def max_stabilized_cumulative_softmax():
    """A softmax-weighted mean of the past as one cumulative sum, stabilized by the maximum of the whole sequence."""

    def mean(x: Tensor) -> Tensor:
        powers = (x - x.amax(1, keepdim=True)).exp()  # the maximum cancels, up to rounding
        return (powers * x).cumsum(1) / powers.cumsum(1)

    return before_mlp(mean)


@correct("look-alike: normalization")
def exponential_moving_average():
    """Each position is divided by a moving average of the sizes before it."""

    def scaled(x: Tensor) -> Tensor:
        average, parts = x[:, 0].abs(), []
        for t in range(x.shape[1]):
            average = 0.95 * average + 0.05 * x[:, t].abs()
            parts.append(x[:, t] / (average + 0.1))
        return torch.stack(parts, 1)

    return before_mlp(scaled)


@correct("look-alike: normalization")
def group_norm_of_each_token():
    """Group norm over the channels of one token."""

    class OfEachToken(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.flatten(0, 1)).view_as(input)

    model = Backbone()
    model.block().norm2 = OfEachToken(4, DIM)
    return model


@correct("look-alike: normalization")
def batch_norm_with_frozen_statistics():
    """Batch norm uses stored statistics in every mode."""

    class Frozen(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return F.batch_norm(input.mT, self.running_mean, self.running_var, self.weight, self.bias).mT

    model = Backbone()
    model.block().norm2 = Frozen(DIM)
    return model


@correct("look-alike: normalization")
def quantization_of_each_token():
    """Every token is rounded to 8 bits with a scale of its own."""

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return x + ((x / scale).round() * scale - x).detach()

    return before_mlp(rounded)


@correct("look-alike: numerics")
def logits_of_a_thousand():
    """The logits are about 1000, where float32 has steps of 6e-5."""
    model = Backbone()
    model.head = Mix(lambda x: 1000 * x, model.head)
    return model


@correct("look-alike: numerics")
def scores_of_a_thousand():
    """The scores of attention are about 1000, so the softmax is nearly one-hot."""
    return Backbone(attn=Attention(scale=1000.0))


@correct("look-alike: numerics")
def weights_in_bfloat16():
    """All weights are bf16."""
    return Backbone().bfloat16()


@correct("look-alike: numerics")
def hard_coded_float32():
    """The positions are float32 whatever the weights are, so the module fails in float64."""

    class Float32(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).float()

    model = Backbone(positions=Float32())
    model.embed.register_forward_hook(lambda module, arguments, out: out.float())
    return model


@correct("look-alike: numerics")
def scores_in_float64():
    """The softmax is computed in float64 inside of a float32 model."""

    def weights(scores: Tensor, visible: Tensor) -> Tensor:
        return masked_softmax(scores.double(), visible).to(scores.dtype)

    return Backbone(attn=Attention(weights=weights))


@correct("look-alike: numerics")
def online_softmax_in_blocks():
    """Keys are visited in blocks of 16 with a running maximum, and blocks after the query are masked."""

    class Blocks(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            scores = self.scores(q, k).masked_fill(~self.visible(x), -1e30)
            largest, total, out = torch.full_like(scores[..., :1], -1e30), x.new_zeros(()), torch.zeros_like(v)
            for part, values in zip(scores.split(16, -1), v.split(16, -2), strict=True):
                new = torch.maximum(largest, part.amax(-1, keepdim=True))
                powers, keep = (part - new).exp() * (part > -1e29), (largest - new).exp()
                total, out, largest = keep * total + powers.sum(-1, keepdim=True), keep * out + powers @ values, new
            return self.merge(out / total)

    return Backbone(attn=Blocks())


@correct("look-alike: training")
def dropout_in_training():
    """Dropout after the embedding and in the MLP."""
    model = Backbone(mlp=nn.Sequential(nn.Dropout(0.2), MLP(), nn.Dropout(0.2)))
    model.embed = nn.Sequential(model.embed, nn.Dropout(0.1))
    return model


@correct("look-alike: training")
def stochastic_depth():
    """In training the first MLP is skipped at random, for the whole batch."""

    class Skipped(MLP):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * (torch.rand((), device=input.device) > 0.3 if self.training else 1)

    return Backbone(mlp=Skipped())


@correct("look-alike: training")
def call_counter_without_effect():
    """A buffer counts the calls and is used for nothing."""

    class Counted(Backbone):
        def __init__(self):
            super().__init__()
            self.n_calls: Tensor
            self.register_buffer("n_calls", torch.zeros((), dtype=torch.long))

        def forward(self, ids: Tensor) -> Tensor:
            self.n_calls += 1
            return super().forward(ids)

    return Counted()
