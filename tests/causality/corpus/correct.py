"""Correct models that look like leaks.

B batch, T queries, S keys, H query heads, D head size, C width, V vocabulary.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.masks import NO_POSITIONS, largest, rotated, window
from tests.causality.corpus.mixing import Convolution, Downsampled, Experts, FFTConvolution, best, gpt
from tests.causality.corpus.net import (
    Attention,
    C,
    H,
    Mix,
    Net,
    Positions,
    Recurrent,
    V,
    add_model,
    causal,
    correct,
    everywhere,
    masked_softmax,
    net,
    previous_token,
    steps,
)
from tests.causality.corpus.table import CONTEXT_LENGTH

ATTN, MLP_0 = "blocks.0.attn", "blocks.0.mlp"


def pattern(name: str, rule, *, n_layers: int = 1, expected=None, **changes: Any) -> None:
    """Adds a model whose every layer has this rule, which is what it is expected to see in one layer."""

    def edit(net):
        for block in net.blocks:
            block.attn = Attention(rule)

    if expected is None:
        expected = lambda length: rule(torch.arange(length)[:, None], torch.arange(length)).bool()  # noqa: E731
    correct(name, ATTN, edit=edit, n_layers=n_layers, expected=expected, **changes)


def window_of_8(q, k):
    return (k <= q) & (k > q - 8)


# Patterns, which are judged by their own `expected`
pattern("sliding_window", window_of_8)
pattern("two_layers_of_sliding_windows", window_of_8, n_layers=2, expected=window(15))
correct("window_below_a_full_layer", rule=window_of_8)
pattern("attention_sinks_and_a_window", lambda q, k: (k <= q) & ((k < 4) | (k > q - 8)))
pattern("block_local_attention", lambda q, k: (k <= q) & (k // 8 == q // 8))
pattern("prefix_language_model", lambda q, k: (k <= q) | (k < 8) & (q < 8), n_layers=2)
pattern("two_tokens_of_lookahead", lambda q, k: k <= q + 2)
pattern("encoder", everywhere)
pattern("each_token_alone", lambda q, k: k == q)

# Attention
correct("causal_attention", rule=causal)
correct("grouped_query_attention", n_kv_heads=2)
correct("scores_of_a_thousand", scale=1000.0)
correct("finite_mask_value_far_below_the_scores", weights=lambda s, v, m: (s - 1e4 * ~v).softmax(-1))
correct("scores_in_float64", weights=lambda s, v, m: masked_softmax(s.double(), v).to(s.dtype))
correct(
    "largest_visible_scores_chosen",
    weights=lambda s, v, m: masked_softmax(s, v & largest(s.masked_fill(~v, -math.inf))),
)
correct(
    "temperature_of_the_visible_length",
    weights=lambda s, v, m: masked_softmax(s * v.sum(-1, keepdim=True).add(1).log().to(s.dtype), v),
)


def softmax_plus_one(s, v, m):
    """A one in the denominator, scaled by the largest visible score."""
    maximum = s.masked_fill(~v, -math.inf).amax(-1, keepdim=True).clamp(min=0)
    powers = (s - maximum).exp() * v
    return powers / ((-maximum).exp() + powers.sum(-1, keepdim=True))


def alibi(s, v, m):
    position = torch.arange(s.shape[-1])
    slopes = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
    return masked_softmax(s - slopes * (position[:, None] - position), v)


correct("no_softmax", weights=lambda s, v, m: s * v)
correct("softmax_plus_one", weights=softmax_plus_one)
correct("alibi", weights=alibi)
correct("no_positions", rule=causal, **NO_POSITIONS)
correct("rotary_positions", turn=lambda x: rotated(x, 100.0), **NO_POSITIONS)


class Fused(Attention):
    def forward(self, x):
        return self.merge(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))


class TorchAttention(nn.MultiheadAttention):
    """Its boolean mask is True where a key is hidden."""

    def __init__(self):
        super().__init__(C, H, dropout=0.1, batch_first=True)

    def forward(self, x):
        hidden = ~causal(steps(x)[:, None], steps(x))
        return super().forward(x, x, x, attn_mask=hidden, need_weights=False)[0]


class OnlineSoftmax(Attention):
    """Keys are visited in blocks of 16 with a running maximum."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = self.scores(q, k).masked_fill(~self.visible(x), -1e30)
        highest, total, out = torch.full_like(scores[..., :1], -1e30), x.new_zeros(()), torch.zeros_like(v)
        for part, values in zip(scores.split(16, -1), v.split(16, -2), strict=True):
            new = torch.maximum(highest, part.amax(-1, keepdim=True))
            powers, kept = (part - new).exp() * (part > -1e29), (highest - new).exp()
            total, out, highest = kept * total + powers.sum(-1, keepdim=True), kept * out + powers @ values, new
        return self.merge(out / total)


class CumulativeAttention(Attention):
    """Linear attention by cumulative sums of keys times values."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)  # (B, H, T, D, D)
        return self.merge(torch.einsum("bhtd,bhtde->bhte", q, sums) / (q * k.cumsum(2)).sum(-1, keepdim=True))


class Retention(Attention):
    """Products of queries and keys decay with the distance."""

    def forward(self, x):
        q, k, v = self.heads(x)
        distance = (steps(x)[:, None] - steps(x)).clamp(min=0).to(x.dtype)
        gamma = 1 - 2.0 ** -torch.arange(3, 3 + H, dtype=x.dtype)[:, None, None]
        return self.merge(q @ k.mT * (gamma**distance).tril() @ v)


def log_space_scan(x: Tensor) -> Tensor:
    """Gates and inputs are summed as logarithms (minGRU)."""
    keep = F.logsigmoid(-x).cumsum(1)
    return (keep + (F.logsigmoid(x) + F.softplus(x).log() - keep).logcumsumexp(1)).exp()


def lstm(**options):
    return lambda: Recurrent(nn.LSTM(C, C, batch_first=True, **options))


for part in (Fused, TorchAttention, OnlineSoftmax, CumulativeAttention, Retention):
    correct(part.__name__, ATTN, part=part)
correct("lstm", ATTN, part=lstm(), n_layers=1, **NO_POSITIONS)
correct("lstm_with_dropout", ATTN, part=lstm(num_layers=2, dropout=0.1), n_layers=1, **NO_POSITIONS)
correct("scan_in_log_space", ATTN, part=lambda: Mix(log_space_scan))

# Convolutions
correct("depthwise_convolution", part=lambda: Convolution(4, 3, 0))
correct("dilated_convolution", part=lambda: Convolution(3, 8, 0, dilation=4))
correct("downsampling_with_enough_padding", part=lambda: Downsampled(2, 1))
correct("fft_convolution_with_zero_padding", part=lambda: FFTConvolution(2))
correct(
    "token_shift_from_the_past", mix=lambda x, m: torch.cat([previous_token(x)[..., : C // 2], x[..., C // 2 :]], -1)
)


def convolve(net):
    for i, block in enumerate(net.blocks):
        block.attn = Convolution(4, 3 * 2**i, 0, dilation=2**i)


correct("convolution_only", ATTN, edit=convolve, n_layers=4, expected=window(46))


# Routing, norms and numerics
def in_order(scores: Tensor) -> Tensor:
    """An expert takes the first six tokens that choose it."""
    chosen = best(scores, 0, dim=-1)
    return chosen * (chosen.cumsum(1) <= 6)


def cumulative_norm(x, m):
    count = (1 + steps(x))[:, None]
    mean, square = x.cumsum(1) / count, x.square().cumsum(1) / count
    return (x - mean) / (square - mean.square() + 0.01).sqrt()


def stabilized(x, m):
    """A softmax-weighted mean of the past; the maximum of the whole sequence cancels, up to rounding."""
    powers = (x - x.amax(1, keepdim=True)).exp()
    return (powers * x).cumsum(1) / powers.cumsum(1)


def of_each_token(x, m):
    scale = x.abs().amax(-1, keepdim=True) / 127
    return x + ((x / scale).round() * scale - x).detach()


class Float32Positions(Positions):
    """float32 whatever the weights are, so the module fails in float64."""

    def forward(self, x):
        return super().forward(x).float()


def hard_coded_float32():
    model = net("positions", part=lambda: Float32Positions(64))
    model.embed.register_forward_hook(lambda module, inputs, out: out.float())
    return model


def gpt2_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=CONTEXT_LENGTH, n_embd=C, n_layer=1, n_head=H))


correct("token_choice_top_2", part=lambda: Experts(lambda s: masked_softmax(s, best(s, 0.5, dim=-1))))
correct("capacity_in_the_order_of_the_tokens", part=lambda: Experts(in_order))
correct("depth_by_a_threshold", mix=lambda x, m: x * (m.x[..., :1] > 0))
correct("cumulative_norm_over_time", mix=cumulative_norm)
correct("cumulative_maximum", mix=lambda x, m: x.cummax(1).values)
correct("max_stabilized_cumulative_softmax", mix=stabilized)
correct("quantization_of_each_token", mix=of_each_token)
correct("logits_of_a_thousand", "head", mix=lambda x, m: 1000 * x)
add_model("weights_in_bfloat16", lambda: net().bfloat16(), leaks=False)
add_model("hard_coded_float32", hard_coded_float32, leaks=False)
correct("gpt", ATTN, root=gpt)
add_model("gpt2_of_transformers", gpt2_of_transformers, leaks=False)

# Training
correct("dropout_in_training", mix=lambda x, m: F.dropout(x, 0.2, m.training))
correct("stochastic_depth", mix=lambda x, m: x * (torch.rand(()) > 0.3) if m.training else x)
correct("buffer_of_zero_before_its_own_token", gate=nn.Buffer, mix=lambda x, m: x + m.gate * x)
correct("call_counter_without_effect", gate=nn.Buffer, mix=lambda x, m: m.gate.add_(1) * 0 + x)


# Interfaces
class Wrapped(nn.Module):
    """The logits in another container."""

    def __init__(self, container):
        super().__init__()
        self.model, self.container = net(), container

    def forward(self, input_ids):
        return self.container(self.model(input_ids))


class InPlace(Net):
    """The output of the embedding is changed in place."""

    def forward(self, ids):
        x = self.embed(ids)
        x += self.positions(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NoGradients(Net):
    @torch.no_grad()
    def forward(self, ids):
        return super().forward(ids)


class Flat(nn.Embedding):
    """Fails for a slice of a larger tensor."""

    def forward(self, input):
        return super().forward(input.view(-1)).view(*input.shape, -1)


def tied():
    model = net()
    model.head = nn.Linear(C, V, bias=False)
    model.head.weight = model.embed.weight
    return model


correct("needs_contiguous_ids", "embed", part=lambda: Flat(V, C))
correct("writes_into_its_embeddings", ATTN, root=InPlace)
correct("without_gradients", ATTN, root=NoGradients)
OTHERS = {
    "tied_weights": tied,
    "compiled_module": lambda: torch.compile(net(), backend="eager", dynamic=True),
    "plain_function": lambda: lambda ids: F.one_hot(ids, V).float().cumsum(1).log1p(),
    "returns_a_dictionary": lambda: Wrapped(lambda logits: {"loss": None, "logits": logits}),
    "returns_a_tuple": lambda: Wrapped(lambda logits: (logits, None)),
    "returns_an_object": lambda: Wrapped(lambda logits: SimpleNamespace(logits=logits)),
}
for name, make in OTHERS.items():
    add_model(name, functools.partial(make), leaks=False)
