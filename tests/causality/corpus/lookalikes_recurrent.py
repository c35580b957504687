"""Correct recurrences, state-space models, linear attention and convolutions.

B batch, T positions, H heads, D head size, C width, N state size.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, N_HEADS, Attention, Backbone, Mix, steps, window
from tests.causality.corpus.entry import VOCAB_SIZE, correct
from tests.causality.corpus.mixing_leaks import Convolution, FFTConvolution
from tests.causality.corpus.recurrence_leaks import Recurrent


class RecurrentModel(nn.Module):
    """Embedding, recurrence, head."""

    def __init__(self, rnn: nn.RNNBase):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(VOCAB_SIZE, DIM), rnn, nn.Linear(DIM, VOCAB_SIZE)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(ids))[0])


@correct("look-alike: recurrent")
def lstm():
    """An LSTM reads the tokens from left to right."""
    return RecurrentModel(nn.LSTM(DIM, DIM, batch_first=True))


@correct("look-alike: recurrent")
def gru():
    """A GRU of two layers reads the tokens from left to right."""
    return RecurrentModel(nn.GRU(DIM, DIM, num_layers=2, batch_first=True))


@correct("look-alike: recurrent")
def elman_rnn():
    """A plain tanh recurrence."""
    return RecurrentModel(nn.RNN(DIM, DIM, batch_first=True))


@correct("look-alike: recurrent")
def lstm_with_dropout():
    """Two LSTM layers with dropout between them in training."""
    return RecurrentModel(nn.LSTM(DIM, DIM, num_layers=2, dropout=0.1, batch_first=True))


@correct("look-alike: recurrent")
def lstm_between_attention_layers():
    """The first attention is replaced by an LSTM; the second one is causal."""
    return Backbone(attn=Recurrent(nn.LSTM(DIM, DIM, batch_first=True)))


@correct("look-alike: recurrent")
def lstm_cell_step_by_step():
    """A loop over an LSTM cell, one token at a time."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTMCell(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            state, outputs = None, []
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
                outputs.append(state[0])
            return torch.stack(outputs, 1)

    return Backbone(attn=Loop())


class SelectiveScan(nn.Module):
    """A state-space layer whose step size, input and output matrices depend on the token (as in Mamba)."""

    def __init__(self, n_states: int = 4):
        super().__init__()
        self.conv = Convolution(4, 3, 0)
        self.step, self.inner = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * n_states)
        self.log_decay = nn.Parameter(torch.linspace(-3, -1, n_states).repeat(DIM, 1))  # (C, N)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(x))
        dt = F.softplus(self.step(x))[..., None]  # (B, T, C, 1)
        b, c = self.inner(x).chunk(2, -1)  # (B, T, N) each
        decay = (-dt * self.log_decay.exp()).exp()  # (B, T, C, N)
        update = dt * x[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(update[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + update[:, t]
            outputs.append((state * c[:, t, None]).sum(-1))  # (B, C)
        return torch.stack(outputs, 1)


@correct("look-alike: state space")
def selective_scan():
    """A Mamba-like scan after a causal depthwise convolution."""
    return Backbone(attn=SelectiveScan())


@correct("look-alike: state space")
def selective_scan_in_both_layers():
    """Two Mamba-like layers without any attention or positions."""
    model = Backbone(attn=SelectiveScan(), positions=Mix(torch.zeros_like))
    model.block(1).attn = SelectiveScan()
    return model


@correct("look-alike: state space")
def diagonal_state_space_as_a_convolution():
    """A fixed state space is applied as one long causal convolution through the frequency domain."""
    return Backbone(attn=FFTConvolution(2))


@correct("look-alike: state space")
def scan_in_log_space():
    """Gates and inputs are summed as logarithms (minGRU), so the whole sequence is one logcumsumexp."""

    def scan(x: Tensor) -> Tensor:
        gate, value = F.logsigmoid(x), F.softplus(x).log()  # of the new value
        keep = F.logsigmoid(-x).cumsum(1)
        return (keep + (gate + value - keep).logcumsumexp(1)).exp()

    return Backbone(attn=Mix(scan))


@correct("look-alike: state space")
def scan_in_chunks():
    """Each chunk of 8 starts from the state before it and sums its own positions causally."""

    def scan(x: Tensor) -> Tensor:
        state, parts = torch.zeros_like(x[:, :1]), []
        for chunk in x.split(8, dim=1):
            decay = 0.9 ** (1 + steps(chunk))[:, None].to(x.dtype)
            own = (chunk / decay).cumsum(1) * decay
            parts.append(own + state * decay)
            state = parts[-1][:, -1:]
        return torch.cat(parts, dim=1)

    return Backbone(attn=Mix(scan))


class CumulativeAttention(Attention):
    """Linear attention by cumulative sums of keys times values, with feature maps elu + 1."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)  # (B, H, T, D, D)
        out = torch.einsum("bhtd,bhtde->bhte", q, sums)
        return self.merge(out / (q * k.cumsum(2)).sum(-1, keepdim=True))


@correct("look-alike: linear attention")
def linear_attention_by_cumulative_sums():
    """Numerator and denominator are cumulative sums over the past."""
    return Backbone(attn=CumulativeAttention())


@correct("look-alike: linear attention")
def retention():
    """Products of queries and keys decay with the distance, within the lower triangle."""

    class Retention(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            distance = (steps(x)[:, None] - steps(x)).to(x.dtype)
            gamma = 1 - 2.0 ** -torch.arange(3, 3 + N_HEADS, device=x.device, dtype=x.dtype)[:, None, None]
            return self.merge(q @ k.mT * (gamma ** distance.clamp(min=0)).tril() @ v)

    return Backbone(attn=Retention())


@correct("look-alike: linear attention")
def fast_weights_with_the_delta_rule():
    """A matrix state is corrected by each key and value in turn."""

    class DeltaRule(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            k = F.normalize(k, dim=-1)
            state, outputs = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
            for t in range(x.shape[1]):
                key, value = k[:, :, t], v[:, :, t]
                error = value - torch.einsum("bhd,bhde->bhe", key, state)
                state = state + 0.5 * key[..., None] * error[..., None, :]
                outputs.append(torch.einsum("bhd,bhde->bhe", q[:, :, t], state))
            return self.merge(torch.stack(outputs, 2))

    return Backbone(attn=DeltaRule())


class TimeMix(nn.Module):
    """RWKV: a token shift, then a weighted mean of the past, whose weights decay and are stabilized by a maximum."""

    def __init__(self):
        super().__init__()
        self.share = nn.Parameter(torch.rand(DIM))
        self.key, self.value, self.receptance, self.out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.decay = nn.Parameter(torch.linspace(0.01, 0.3, DIM))

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + self.share * (F.pad(x, (0, 0, 1, -1)) - x)
        k, v = self.key(mixed), self.value(mixed)
        above = below = torch.zeros_like(k[:, 0])
        largest, outputs = torch.full_like(above, -math.inf), []
        for t in range(x.shape[1]):
            new = torch.maximum(largest - self.decay, k[:, t])
            old, own = (largest - self.decay - new).exp(), (k[:, t] - new).exp()
            above, below, largest = old * above + own * v[:, t], old * below + own, new
            outputs.append(above / below)
        return self.out(self.receptance(mixed).sigmoid() * torch.stack(outputs, 1))


@correct("look-alike: linear attention")
def rwkv_time_mix():
    """Token shift from the position before, and a max-stabilized weighted mean of the past."""
    return Backbone(attn=TimeMix())


@correct("look-alike: convolution")
def token_shift_from_the_past():
    """Half of the channels come from the position before."""

    def shifted(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([F.pad(first, (0, 0, 1, -1)), second], -1)

    model = Backbone()
    model.block().mlp = nn.Sequential(Mix(shifted), model.block().mlp)
    return model


@correct("look-alike: convolution")
def depthwise_convolution():
    """A kernel of 4, padded by 3 on the left."""
    return Backbone(mlp=Convolution(4, 3, 0))


@correct("look-alike: convolution")
def dilated_convolution():
    """A kernel of 3 with dilation 4, padded by 8 on the left."""
    return Backbone(mlp=Convolution(3, 8, 0, dilation=4))


@correct("look-alike: convolution")
def convolution_truncated_on_the_right():
    """The convolution pads both sides by 3, and the last 3 outputs are cut off."""

    class Truncated(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(DIM, DIM, 4, padding=3, groups=DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.mT)[..., : x.shape[1]].mT

    return Backbone(mlp=Truncated())


@correct("look-alike: convolution")
def fft_convolution_with_zero_padding():
    """A long convolution, padded to twice its length; its outputs change by rounding with any token."""
    return Backbone(mlp=FFTConvolution(2))


@correct("look-alike: convolution", expected=window(46))
def convolution_only():
    """A stack of dilated causal convolutions without attention, which sees 1 + 3 * (1 + 2 + 4 + 8) positions."""
    model = Backbone(n_layers=4)
    for i, block in enumerate(model.blocks):
        block.attn = Convolution(4, 3 * 2**i, 0, dilation=2**i)
    return model
