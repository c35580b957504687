"""Leaks of recurrences, of linear attention and of dense mixing over the sequence.

B batch, T positions, H heads, D head size, C width.
"""

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, MLP, Attention, Backbone, Mix, steps
from tests.causality.corpus.entry import CONTEXT_LENGTH, leak

ATTENTION, FFN = {"place": "blocks.0.attn"}, {"place": "blocks.0.mlp"}


class Recurrent(nn.Module):
    """A recurrent layer of torch that returns its outputs, (B, T, C)."""

    def __init__(self, rnn: nn.RNNBase):
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


@leak("recurrence", **ATTENTION)
def bidirectional_gru():
    """Half of the state comes from a second recurrence that starts at the end."""
    return Backbone(attn=Recurrent(nn.GRU(DIM, DIM // 2, batch_first=True, bidirectional=True)))


@leak("recurrence", **ATTENTION)
def lstm_in_reverse():
    """The recurrence runs from the last token to the first."""
    lstm = Recurrent(nn.LSTM(DIM, DIM, batch_first=True))
    return Backbone(attn=nn.Sequential(Mix(lambda x: x.flip(1)), lstm, Mix(lambda x: x.flip(1))))


@leak("recurrence", **ATTENTION)
def lstm_that_starts_from_the_last_state():
    """The initial hidden state is the final state of a first pass over the same sequence."""

    class TwicePassed(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            _, state = self.rnn(x)
            return self.rnn(x, state)[0]

    return Backbone(attn=TwicePassed(nn.LSTM(DIM, DIM, batch_first=True)))


@leak("recurrence", **ATTENTION)
def cumulative_sum_from_the_end():
    """The cumulative mean is taken over the reversed sequence."""
    return Backbone(attn=Mix(lambda x: x.flip(1).cumsum(1).flip(1) / (1 + steps(x)[:, None])))


@leak("recurrence", **ATTENTION)
def state_of_a_chunk_that_includes_itself():
    """The chunked scan adds the state at the end of a chunk of 8 to all positions of that chunk."""

    def scan(x: Tensor) -> Tensor:
        state, parts = torch.zeros_like(x[:, :1]), []
        for chunk in x.split(8, dim=1):
            state = 0.5 * state + chunk.mean(1, keepdim=True)  # (B, 1, C)
            parts.append(chunk + state)
        return torch.cat(parts, dim=1)

    return Backbone(attn=Mix(scan))


@leak("recurrence", **ATTENTION)
def scan_with_the_next_gate():
    """The decay at each step is a function of the next input."""

    def scan(x: Tensor) -> Tensor:
        state, parts = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = x[:, min(t + 1, x.shape[1] - 1)].sigmoid() * state + x[:, t]  # (B, C)
            parts.append(state)
        return torch.stack(parts, dim=1)

    return Backbone(attn=Mix(scan))


class LinearAttention(Attention):
    """Attention without a softmax: elu(q) + 1 and elu(k) + 1 are its feature maps.

    Args:
        masked, normalized_by_all: whether the sums of keys and values are causal, and whether the denominator is not.
    """

    def __init__(self, *, masked: bool, normalized_by_all: bool):
        super().__init__()
        self.masked, self.normalized_by_all = masked, normalized_by_all

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        products = q @ k.mT  # (B, H, T, T)
        past = products.tril()
        out = (past if self.masked else products) @ v
        return self.merge(out / (products if self.normalized_by_all else past).sum(-1, keepdim=True))


@leak("global mixing", **ATTENTION)
def linear_attention_with_one_state_for_all():
    """The sum of keys times values is taken over the whole sequence once."""
    return Backbone(attn=LinearAttention(masked=False, normalized_by_all=True))


@leak("global mixing", **ATTENTION)
def linear_attention_normalized_by_all_keys():
    """The numerator is causal, and the denominator sums all keys."""
    return Backbone(attn=LinearAttention(masked=True, normalized_by_all=True))


@leak("global mixing", **ATTENTION)
def retention_with_a_symmetric_decay():
    """The decay counts the distance without its sign, so later tokens take part as earlier ones do."""

    class Retention(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            decay = 0.8 ** (steps(x)[:, None] - steps(x)).abs()
            return self.merge(q @ k.mT * decay.to(x.dtype) @ v)

    return Backbone(attn=Retention())


class TokenMixer(nn.Module):
    """A dense matrix over positions, as in MLP-Mixer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CONTEXT_LENGTH, CONTEXT_LENGTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[: x.shape[1], : x.shape[1]] @ x


@leak("global mixing", **FFN)
def dense_matrix_over_positions():
    """A learned matrix mixes all positions, without a triangle."""
    return Backbone(mlp=TokenMixer())


@leak("global mixing", **ATTENTION)
def fourier_transform_over_positions():
    """The layer is the real part of a Fourier transform over the sequence, as in FNet."""
    return Backbone(attn=Mix(lambda x: torch.fft.fft(x, dim=1).real / x.shape[1] ** 0.5))


@leak("global mixing", **FFN)
def low_pass_filter_over_positions():
    """The upper half of the frequencies over time is removed."""

    def filtered(x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=1)
        keep = torch.arange(spectrum.shape[1], device=x.device) <= spectrum.shape[1] // 2
        return torch.fft.irfft(spectrum * keep[:, None], x.shape[1], dim=1)

    return Backbone(mlp=nn.Sequential(Mix(filtered), MLP()))


@leak("global mixing", **FFN)
def positions_sorted_by_a_channel():
    """The tokens are ranked by their first channel, and the rank among all of them is an input."""
    return Backbone(mlp=nn.Sequential(Mix(lambda x: x + x[..., :1].argsort(1).argsort(1) / 8), MLP()))


@leak("global mixing", **ATTENTION)
def keys_of_a_fixed_number_of_landmarks():
    """Keys and values are projected from all positions to four landmarks, which no triangle can mask."""

    class Landmarks(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            group = steps(x) % 4 == torch.arange(4, device=x.device)[:, None]  # (4, T)
            mean = group.to(x.dtype) / group.sum(-1, keepdim=True).clamp(min=1)
            return self.merge(self.scores(q, mean @ k).softmax(-1) @ (mean @ v))

    return Backbone(attn=Landmarks())
