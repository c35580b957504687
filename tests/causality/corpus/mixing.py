"""Leaks of layers that mix positions or rows outside of the mask, and of other parts of the model.

B batch, T positions, C width, E experts, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.masks import ROWS
from tests.causality.corpus.net import (
    END_OF_TEXT,
    MLP,
    PADDING,
    SEPARATOR,
    Attention,
    C,
    D,
    H,
    Recurrent,
    V,
    add_model,
    leak,
    masked_softmax,
    net,
    next_token,
    steps,
)
from tests.causality.corpus.table import CONTEXT_LENGTH, Trigger

NANOCHAT = "karpathy/nanochat/issues/844"
IN_TRAINING = Trigger(training=True)

# Normalization, pooling and shifts
leak("norm_over_time", mix=lambda x, m: (x - x.mean(1, True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt())
leak("rms_over_the_sequence", mix=lambda x, m: x * (x.square().mean((1, 2), keepdim=True) + 1e-5).rsqrt())
leak("min_max_scaling_over_time", mix=lambda x, m: (x - x.amin(1, True)) / (x.amax(1, True) - x.amin(1, True) + 1e-3))
leak("mean_of_the_sequence_added", mix=lambda x, m: x + x.mean(1, True))
leak("maximum_of_the_sequence_added", mix=lambda x, m: x + x.amax(1, True))
leak("squeeze_and_excitation", mix=lambda x, m: x * (4 * x.mean(1, True)).sigmoid())
leak("token_shift_by_a_roll", mix=lambda x, m: 0.5 * (x + x.roll(1, 1)))
leak("detached_next_token", mix=lambda x, m: x + 0.1 * next_token(x.detach()))
leak("next_token_in_one_channel", mix=lambda x, m: x + next_token(x) * (torch.arange(C) == 7))
leak("next_token_times_1e_6", mix=lambda x, m: x + 1e-6 * next_token(x))
leak("leak_below_the_rounding_of_float32", mix=lambda x, m: x + 1e-9 * next_token(x), when=Trigger(dtype=torch.float64))


def means(x: Tensor, size: int) -> Tensor:
    """The mean of the block of each position, (B, T, C)."""
    padded = F.pad(x, (0, 0, 0, -x.shape[1] % size)).unflatten(1, (-1, size))  # (B, T / size, size, C)
    return padded.mean(2, keepdim=True).expand_as(padded).flatten(1, 2)[:, : x.shape[1]]


leak("aggregation_inside_a_block", mix=lambda x, m: x + means(x, 16), source=NANOCHAT)
leak("state_of_a_chunk_that_includes_itself", mix=lambda x, m: x + means(x, 8) + 0.5 * means(x, 8).roll(8, 1))


class Convolution(nn.Module):
    """A depthwise convolution over (B, T, C) with the given padding on the left and on the right."""

    def __init__(self, kernel_size: int, left: int, right: int, dilation: int = 1):
        super().__init__()
        self.padding = (left, right)
        self.conv = nn.Conv1d(C, C, kernel_size, groups=C, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, self.padding)).mT


class Downsampled(nn.Module):
    """A convolution of stride 2 over (B, T, C) with the given padding; both positions of a pair get its output."""

    def __init__(self, left: int, right: int):
        super().__init__()
        self.padding = (left, right)
        self.conv = nn.Conv1d(C, C, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x.mT, self.padding)).mT.repeat_interleave(2, 1)[:, : x.shape[1]]


class FFTConvolution(nn.Module):
    """A long convolution through the frequency domain; `padding` times its own length is padded."""

    def __init__(self, padding: int = 1):
        super().__init__()
        self.padding = padding
        self.filter = nn.Parameter(torch.linspace(0, -3, CONTEXT_LENGTH).exp()[:, None] * torch.randn(1, C) / 2)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        size = self.padding * length
        spectrum = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(self.filter[:length], size, dim=0)
        return torch.fft.irfft(spectrum, size, dim=1)[:, :length]


class ChunkMixer(nn.Module):
    """Whole chunks of 8, 16 and 32 tokens are mixed by a dense matrix each."""

    def __init__(self):
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(size, size, bias=False) for size in (8, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for mixer in self.mixers:
            size = mixer.in_features
            whole = x.shape[1] // size * size
            chunks = x[:, :whole].unflatten(1, (-1, size))  # (B, T / size, size, C)
            out = out + F.pad(mixer(chunks.mT).mT.flatten(1, 2), (0, 0, 0, x.shape[1] - whole))
        return out


leak("convolution_padded_one_too_little", part=lambda: Convolution(4, 2, 1))
leak("same_padding_in_a_causal_convolution", part=lambda: Convolution(5, 2, 2), source="tensorflow/models/issues/10062")
leak(
    "downsampling_with_too_little_padding", part=lambda: Downsampled(1, 2), source="lucidrains/magvit2-pytorch/pull/27"
)
leak("fft_convolution_without_zero_padding", part=FFTConvolution)
leak("circular_mixing", part=FFTConvolution, edit=lambda net: net.blocks[0].mlp.filter.data.normal_(), source=NANOCHAT)
leak("chunks_that_mix_their_tokens", part=ChunkMixer, source=NANOCHAT)
leak(
    "bidirectional_gru",
    "blocks.0.attn",
    part=lambda: Recurrent(nn.GRU(C, C // 2, batch_first=True, bidirectional=True)),
)


class LinearAttention(Attention):
    """Numerator over the past, denominator over all keys."""

    def forward(self, x):
        q, k, v = self.heads(x)
        products = (F.elu(q) + 1) @ (F.elu(k) + 1).mT  # (B, H, T, T)
        return self.merge(products.tril() @ v / products.sum(-1, keepdim=True))


class Linformer(Attention):
    """Keys and values are projected over the sequence to 16 rows, whose triangle hides nothing of the future."""

    def __init__(self):
        super().__init__()
        self.projection = nn.Parameter(torch.randn(16, CONTEXT_LENGTH) / 8)

    def forward(self, x):
        q, k, v = self.heads(x)
        projection = self.projection[:, : x.shape[1]]
        visible = steps(x)[:, None] >= torch.arange(16)
        return self.merge(masked_softmax(self.scores(q, projection @ k), visible) @ (projection @ v))


leak("linear_attention_normalized_by_all_keys", "blocks.0.attn", part=LinearAttention)
leak("linformer_with_a_causal_flag", "blocks.0.attn", part=Linformer, source="tatp22/linformer-pytorch/issues/25")


# Routing
class Experts(nn.Module):
    """A mixture of experts.

    Args:
        choose: router scores (B, T, E) -> weight of each expert at each token, (B, T, E).
    """

    def __init__(self, choose, n_experts: int = 4):
        super().__init__()
        self.router, self.choose = nn.Linear(C, n_experts, bias=False), choose
        self.experts = nn.ModuleList(MLP() for _ in range(n_experts))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], -1)  # (B, T, C, E)
        return (outputs * self.choose(4 * self.router(x))[:, :, None]).sum(-1)


def best(scores: Tensor, share: float, dim: int = 1) -> Tensor:
    """Mask of the largest `share` of the scores along a dimension."""
    number = max(1, round(share * scores.shape[dim]))
    return torch.zeros_like(scores, dtype=torch.bool).scatter(dim, scores.topk(number, dim).indices, True)


def by_priority(scores: Tensor) -> Tensor:
    """A full expert drops the tokens with the lowest scores, wherever they are."""
    chosen = best(scores, 0, dim=-1)
    return chosen * best(scores.masked_fill(~chosen, -torch.inf), 0.2)


def balanced(scores: Tensor) -> Tensor:
    """Sinkhorn."""
    weights = scores.exp()
    for _ in range(3):
        weights = weights / weights.sum(1, keepdim=True)
        weights = weights / weights.sum(-1, keepdim=True)
    return weights


class ChosenHeads(Attention):
    """Each head attends among the half of the tokens that its router ranks first in the sequence."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(C, H)

    def forward(self, x):
        q, k, v = self.heads(x)
        chosen = best(self.router(x), 0.5).mT[:, :, None] | torch.eye(x.shape[1], dtype=torch.bool)  # (B, H, T, T)
        return self.merge(masked_softmax(self.scores(q, k), self.visible(x) & chosen) @ v)


leak(  # as in Reformer
    "tokens_sorted_into_buckets",
    mix=lambda x, m: x + x[..., :1].argsort(1).argsort(1) * torch.linspace(-0.1, 0.1, C).to(x),
)
leak("experts_that_choose_their_tokens", part=lambda: Experts(lambda scores: scores.softmax(-1) * best(scores, 0.25)))
leak("capacity_by_priority", part=lambda: Experts(by_priority))
leak("routing_balanced_by_sinkhorn", part=lambda: Experts(balanced))
leak("mixture_of_depths", mix=lambda x, m: x * best(m.x[..., :1], 0.5))
leak("attention_heads_that_choose_their_tokens", "blocks.0.attn", part=ChosenHeads, source="piotrpiekos/MoSA/issues/3")


# Quantization with one scale for the sequence
def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """8-bit numbers, with the gradient of the identity."""
    return x + ((x / scale * 127).round().clamp(-127, 127) / 127 * scale - x).detach()


def with_zero_point(x: Tensor, m) -> Tensor:
    low, high = x.amin((1, 2), keepdim=True), x.amax((1, 2), keepdim=True)
    return low + rounded(x - low, high - low)


leak("quantization_by_the_largest_value", mix=lambda x, m: rounded(x, x.abs().amax((1, 2), keepdim=True)))
leak("quantization_by_channel", mix=lambda x, m: rounded(x, x.abs().amax(1, True)))
leak("quantization_zero_point", mix=with_zero_point)
leak("quantized_keys", "blocks.0.attn.k_proj", mix=lambda k, m: rounded(k, k.abs().amax((1, 2), keepdim=True)))


# The length of the text, and single positions
def at(x: Tensor, position: int) -> Tensor:
    """(T, 1): which position it is; a negative one counts from the end."""
    return (steps(x) == position % x.shape[1])[:, None] * (x.shape[1] > abs(position))


def share(x: Tensor) -> Tensor:
    """(T, 1): positions of (T, C), divided by the length."""
    return torch.linspace(0, 1, len(x))[:, None].to(x)


leak("scaled_by_the_length", mix=lambda x, m: 8 * x / x.shape[1])
leak("logits_scaled_by_the_length", "head", mix=lambda x, m: x * (1 + x.shape[1] / 100))
leak(
    "layer_skipped_in_long_inputs",
    "blocks.1",
    mix=lambda x, m: x if x.shape[1] <= 32 else m.x,
    when=Trigger(length=40, cut=20),
)
leak("positions_counted_from_the_end", "positions", mix=lambda x, m: x.flip(0))
leak("positions_of_a_right_aligned_table", "positions", mix=lambda x, m: m.table[-len(x) :])
leak(
    "positions_as_a_share_of_the_length",
    "positions",
    mix=lambda x, m: m.table[:1] * torch.linspace(0, 1, len(x))[:, None].to(x),
)
leak("last_position_knows_that_it_is_last", "positions", mix=lambda x, m: x + F.pad(m.table[:1], (0, 0, len(x) - 1, 0)))
leak("parity_of_the_length", "positions", mix=lambda x, m: x * (1 + len(x) % 2))
leak("position_40_sees_the_next", mix=lambda x, m: x + at(x, 40) * next_token(x), when=Trigger(length=48, cut=41))
leak(
    "position_256_sees_the_next",
    mix=lambda x, m: x + at(x, 256) * next_token(x),
    context_length=320,
    when=Trigger(length=280, cut=257),
)


# Tokens
def marked(marks):
    """Adds a direction times marks, ids (B, T) -> (B, T), to the embeddings."""
    return lambda x, m: x + marks(m.ids)[..., None] * torch.linspace(-2, 2, C).to(x)


def later(chosen: Tensor) -> Tensor:
    """(B, T): how many of the positions after each one are True."""
    return chosen.flip(1).cumsum(1).flip(1) - chosen.long()


def ahead(ids: Tensor, distance: int = 1) -> Tensor:
    """(B, T): the id that many positions after each one; -1 beyond the end."""
    return F.pad(ids[:, distance:], (0, min(distance, ids.shape[1])), value=-1)


RARE = 60
MARKS = {
    "end_of_text_announced": (lambda ids: ahead(ids) == END_OF_TEXT, Trigger(tokens=(END_OF_TEXT,))),
    "documents_counted_from_the_end": (lambda ids: later(ids == END_OF_TEXT), Trigger(tokens=(END_OF_TEXT,))),
    "distance_to_the_next_separator": (
        lambda ids: F.max_pool1d(F.pad((ids == SEPARATOR).float(), (0, 5)), 6, stride=1),
        Trigger(tokens=(SEPARATOR,)),
    ),
    "repetition_announced": (lambda ids: ahead(ids) == ids, Trigger(before=(RARE,), tokens=(RARE,))),
    "pair_of_tokens_announced": (lambda ids: (ahead(ids) == 7) & (ahead(ids, 2) == 13), Trigger(tokens=(7, 13))),
    "sum_of_two_later_tokens": (
        lambda ids: ahead(ids) + ahead(ids, 2) == 2 * RARE - 1,
        Trigger(tokens=(RARE - 1, RARE)),
    ),
    "rare_token_counted_over_the_sequence": (
        lambda ids: (ids == RARE).sum(1, keepdim=True).expand_as(ids),
        Trigger(tokens=(RARE,)),
    ),
    "length_without_padding": (
        lambda ids: (ids != PADDING).sum(1, keepdim=True).expand_as(ids) / 10,
        Trigger(tokens=(PADDING, PADDING, PADDING)),
    ),
    "masked_token_replaced_by_the_next": (lambda ids: (ids == 3) * ahead(ids), Trigger(before=(3,))),
}
for name, (marks, when) in MARKS.items():
    leak(name, "embed", mix=marked(marks), when=when)


# Training mode and precision
def trained(function):
    return lambda x, m: function(x) if m.training else x


leak("noise_scaled_by_the_sequence", mix=trained(lambda x: x + x.std() * torch.randn_like(x)), when=IN_TRAINING)
leak(
    "mixed_with_a_random_later_token",
    mix=trained(lambda x: x + 0.2 * x[:, torch.randperm(x.shape[1])]),
    when=IN_TRAINING,
)
leak("layer_dropped_by_the_sequence", mix=trained(lambda x: x * (x[:, -1:, :1] > 0)), when=IN_TRAINING)
leak(
    "normalized_over_time_in_bfloat16",
    mix=lambda x, m: F.layer_norm(x, x.shape[1:]) if x.dtype == torch.bfloat16 else x,
    when=Trigger(dtype=torch.bfloat16),
)


class OverTime(nn.Module):
    """A norm of (B, C, T)."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT


leak("batch_norm_in_training", "blocks.0.norm2", part=lambda: OverTime(nn.BatchNorm1d(C)), when=IN_TRAINING)

# Gates of 0, and gradients
GATE = Trigger(values={"blocks.0.mlp.gate": 1.0})
leak("buffer_of_zero_before_a_mean", gate=nn.Buffer, mix=lambda x, m: x + m.gate * x.mean(1, True), when=GATE)
leak("buffer_of_zero_before_the_next_token", gate=nn.Buffer, mix=lambda x, m: x + m.gate * next_token(x), when=GATE)
leak("learned_gate_of_zero", gate=nn.Parameter, mix=lambda x, m: x + m.gate * next_token(x), when=GATE)
leak(
    "straight_through_next_token",
    mix=lambda x, m: x + (next_token(x) - next_token(x).detach()),
    when=Trigger(gradient_only=True),
)
leak(  # a step function hides a mean over the sequence, and its replaced gradient does not
    "straight_through_quantization_by_all_tokens",
    mix=lambda x, m: (soft := x + 0.1 * x.mean(1, True)) + (x.round() - soft).detach(),
    when=Trigger(gradient_only=True),
)


def faint(x: Tensor, m) -> Tensor:
    """One head adds a millionth of its result without a mask."""
    q, k, v = m.heads(m.x)
    return x + 1e-6 * m.merge((m.scores(q, k).softmax(-1) @ v) * (torch.arange(H)[:, None, None] == 2))


def noisy(x: Tensor, m) -> Tensor:
    """Noise of 1e-2, new in every call whatever the random state, hides a leak of 1e-3."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(m.calls))
    return x + 1e-2 * noise.to(x) + 1e-3 * next_token(x)


leak("one_head_with_a_millionth_of_the_future", "blocks.0.attn", mix=faint)
leak("noise_above_a_leak", mix=noisy)

# Rows of the batch
leak("rows_rolled", mix=lambda x, m: x + 0.1 * x.roll(1, 0), when=ROWS)
leak("centered_over_the_batch", mix=lambda x, m: x - x.mean(0, keepdim=True), when=ROWS)
leak("scaled_by_the_batch_size", mix=lambda x, m: x / len(x), when=ROWS)
leak("small_change_by_the_batch_size", mix=lambda x, m: x * (1 + 1e-3 * (len(x) - 1)), when=ROWS)
leak("first_row_used_for_all", mix=lambda x, m: x + x[:1].cumsum(1) / (1 + steps(x)[:, None]), when=ROWS)
leak("rows_sorted_and_not_restored", mix=lambda x, m: x + 0.1 * x[x[:, 0, 0].argsort()], when=ROWS)
leak(  # 24 tokens of the batch in order
    "expert_capacity_shared_by_the_batch",
    mix=lambda x, m: x * ((chosen := (m.x[..., :1] > 0).flatten(0, 1)).cumsum(0) * chosen <= 24).view(*x.shape[:2], 1),
    when=ROWS,
)


class Flattened(Attention):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)[None]).view_as(x)


leak("attention_over_the_flattened_batch", "blocks.0.attn", part=Flattened, when=ROWS)


def function(change):
    """A plain function around a model."""

    def make():
        model = net()
        return lambda ids: (logits := model(ids)) + change(logits)

    return make


FUNCTIONS = {
    "fourth_row_sees_the_future": lambda x: 0.5 * next_token(x) * (torch.arange(len(x)) == 3)[:, None, None],
    "sees_the_future_in_batches_of_even_size": lambda x: 0.5 * next_token(x) * (len(x) % 2 == 0),
    "function_of_positions_from_the_end": lambda x: 0.01 * (x.shape[1] - steps(x))[:, None],
}
for name, change in FUNCTIONS.items():
    add_model(name, function(change), leaks=True, when=ROWS)


# Our own GPT
def gpt(**_):
    from tril.model.config import GPTConfig
    from tril.model.gpt import GPT

    shape = {"n_layers": 2, "dim": 4 * D, "n_heads": 4, "n_kv_heads": 2, "backend": "explicit"}
    shape |= {"key_offset": True, "embed_skip": True, "value_embed": True}
    model = GPT(GPTConfig(vocab_size=V, context_length=CONTEXT_LENGTH, **shape))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


leak("gpt_with_a_leak_of_1e_6", "blocks.1.attn", root=gpt, mix=lambda x, m: x + 1e-6 * next_token(x))
leak(
    "gpt_with_a_leak_at_position_40",
    root=gpt,
    mix=lambda x, m: x + at(x, 40) * next_token(x),
    when=Trigger(length=48, cut=41),
)
leak("gpt_with_a_mean_in_training", root=gpt, mix=trained(lambda x: x + x.mean(1, keepdim=True)), when=IN_TRAINING)
leak(
    "gpt_that_scales_long_inputs",
    "blocks.0.attn",
    root=gpt,
    mix=lambda x, m: x * max(1.0, x.shape[1] / 40),
    when=Trigger(length=48),
)
leak("gpt_with_mixed_rows", "blocks.0.attn", root=gpt, mix=lambda x, m: x + 0.05 * x.roll(1, 0), when=ROWS)
