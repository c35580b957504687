"""The table: models, cached models and training pipelines that leak, and correct ones that look alike.

Nothing here knows the certificate; `test_table.py` certifies every row.

B batch, T queries, S keys, H heads, D head size, C width, E experts, N tokens of a text, V vocabulary.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.net import (
    CONTEXT_LENGTH,
    Attention,
    C,
    CachedNet,
    H,
    Mix,
    V,
    causal,
    masked_softmax,
    mlp,
    net,
    steps,
)
from tests.conftest import tiny_gpt

EOT, PADDING, RARE = 0, 2, 60  # ids with a meaning in some rows
ATTN = "blocks.0.attn"


@dataclass(frozen=True)
class Row:
    """A row.

    Attributes:
        kind: what `make` returns: "logits": a module or function from ids (B, T) to logits (B, T, V), T from 1 to
            `context_length`; "cached": a module with the arguments and outputs of a `transformers` model;
            "pipeline": see `pipeline`.
        place: name of the submodule that leaks; "" where there is none.
        expected: T -> (T, T) bool, True = may be seen; None: the lower triangle.
        by_chance: the certificate finds it with some seeds of its texts only.
    """

    name: str
    leaks: bool
    kind: str
    make: Callable[[], Any]
    place: str = ""
    expected: Callable[[int], Tensor] | None = None
    context_length: int = CONTEXT_LENGTH
    by_chance: bool = False

    def build(self) -> Any:
        """The same object at each call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()


def row(name: str, at: str = "", *, leaks: bool, **changes: Any) -> Row:
    """A model; `changes` are the arguments of `net` and the fields of `Row`."""
    at = at or ("blocks.0.mlp" if {"mix", "part"} & changes.keys() else ATTN)
    fields = {key: changes[key] for key in Row.__dataclass_fields__ if key in changes}
    arguments = {key: value for key, value in changes.items() if key not in fields or key == "context_length"}
    return Row(name, leaks, "logits", functools.partial(net, at, **arguments), at, **fields)


leak, correct = functools.partial(row, leaks=True), functools.partial(row, leaks=False)


# --- Leaks of the mask
def window(width: int) -> Callable[[int], Tensor]:
    """T -> (T, T) bool: the own position and the width - 1 before it."""
    return lambda length: torch.ones(length, length).tril().triu(1 - width).bool()


def everywhere(q: Tensor, k: Tensor) -> Tensor:
    return (q >= 0) & (k >= 0)


def same_document(m, starts: Tensor | None = None) -> Tensor:
    """(B, 1, T, T): documents start at an end of text, or where `starts` (B, T) is True."""
    document = (m.ids == EOT if starts is None else starts).cumsum(1)
    return document[:, None, :, None] == document[:, None, None, :]


def number(x: Tensor) -> Tensor:  # of each row, (B, 1, 1)
    return torch.arange(len(x))[:, None, None]


def square(x: Tensor) -> Tensor:
    """(T, T) of True for (B, T, C) or (B, H, T, D)."""
    return torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool)


def largest(s: Tensor, number: int = 4) -> Tensor:
    return s >= s.topk(min(number, s.shape[-1]), -1).values[..., -1:]


def sdpa(q, k, v, m=None, mask=None):
    """Fused attention with a mask, causal without one."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def dynamic_mask(q, k, v, m):
    """Chooses keys by their values. Without padding the causal mask is a flag, which a mask replaces."""
    gate = v.mean(-1)[:, :, None].expand(-1, -1, q.shape[2], -1)  # (B, H, T, S)
    return sdpa(q, k, v, mask=gate.masked_fill(~largest(gate, 16), -math.inf))


def with_dropout(s, v, m):
    return F.dropout(masked_softmax(s, v), 0.1, m.training)


MASKS = [
    leak("no_mask", rule=everywhere),
    leak("mask_off_by_one", rule=lambda q, k: k <= q + 1),
    leak("mask_open_at_one_boundary", rule=lambda q, k: causal(q, k) | (q == 31) & (k == 32)),
    leak("mask_missing_in_one_head", rule=lambda q, k: causal(q, k) | (torch.arange(H) == 2)[:, None, None]),
    leak("mask_buffer_of_a_shorter_context", rule=lambda q, k: (k <= q) | (k >= 32)),
    leak("zeros_behind_an_open_mask", rule=everywhere, edit=lambda net: net.blocks[0].attn.o_proj.weight.data.zero_()),
    leak("big_bird_with_an_encoder_mask", rule=lambda q, k: (k < 8) | ((q // 8 - k // 8).abs() <= 1)),
    leak("megatron_bert_with_an_encoder_mask", "blocks.1.attn", rule=everywhere),
    leak("llama4_with_an_inverted_mask", rule=lambda q, k: (k > q) | (q == len(k) - 1)),
    leak("doge_with_a_dynamic_mask", attend=dynamic_mask),
    leak("hidden_keys_shown_by_sdpa", attend=lambda q, k, v, m: sdpa(q, k, v, mask=square(q).triu(1)).nan_to_num()),
    leak("causal_flag_dropped_with_dropout", unmasked=lambda m: m.training, weights=with_dropout),
    leak("causal_flag_dropped_with_padding", unmasked=lambda m: (m.ids == PADDING).any(1)),
    leak("causal_flag_not_forwarded", ATTN, part=lambda: nn.Sequential(Attention(everywhere))),
    leak("window_one_too_wide", rule=lambda q, k: (k <= q) & (k >= q - 8), n_layers=1, expected=window(8)),
    leak("unmasked_at_multiples_of_64", unmasked=lambda m: m.x.shape[1] % 64 == 0, context_length=160),
    leak("unmasked_from_100_to_120", unmasked=lambda m: 100 <= m.x.shape[1] <= 120, context_length=160),
    leak("unmasked_at_three_primes", unmasked=lambda m: m.x.shape[1] in (37, 43, 61)),
    leak("unmasked_below_5", unmasked=lambda m: m.x.shape[1] < 5),
    leak("unmasked_in_training", unmasked=lambda m: m.training and m.x.shape[1] > 37),
    leak("unmasked_in_evaluation", unmasked=lambda m: not m.training),
    leak("unmasked_without_gradients", unmasked=lambda m: not torch.is_grad_enabled()),
    leak("unmasked_with_gradients", unmasked=lambda m: torch.is_grad_enabled()),
    leak("unmasked_in_bfloat16", unmasked=lambda m: m.x.dtype == torch.bfloat16),
    leak("unmasked_in_float32", unmasked=lambda m: m.x.dtype == torch.float32),
    leak("unmasked_under_autocast", unmasked=lambda m: torch.is_autocast_enabled("cpu")),
    leak("mask_that_comes_off_after_500_calls", unmasked=lambda m: m.calls > 500),
    leak("mask_missing_in_every_seventh_call", unmasked=lambda m: m.calls % 7 == 0),
    leak("mask_of_the_wrong_dimension", unmasked=lambda m: steps(m.x) <= number(m.x)[..., None]),
    leak("document_mask_joined_by_or", unmasked=same_document),
    leak("other_documents_seen_without_the_mask", unmasked=lambda m: ~same_document(m)),
]


# --- Leaks of the scores and of the softmax
def eye(s: Tensor) -> Tensor:
    return torch.eye(s.shape[-1], dtype=torch.bool)


def linformer(q, k, v, m):
    """Keys and values are projected over the sequence to 16 rows, whose triangle hides nothing of the future."""
    rows = torch.arange(16)
    projection = (rows[:, None] * torch.arange(q.shape[2])).to(q.dtype).cos() / 8
    return masked_softmax(q @ (projection @ k).mT, torch.arange(q.shape[2])[:, None] >= rows) @ (projection @ v)


def chosen_tokens(s, v, m):
    """Each head attends among the half of the tokens that its router ranks first in the sequence."""
    return masked_softmax(s, v & (best(m.x[..., :H], 0.5).mT[:, :, None] | eye(s)))


def rounded_positions(m):
    """bf16 rounds 257 to 256."""
    return steps(m.x).to(m.x.dtype) <= steps(m.x).to(m.x.dtype)[:, None]


SCORES = [
    leak("multiplied_after_the_softmax", weights=lambda s, v, m: s.softmax(-1) * v),
    leak("scores_scaled_by_the_next_query", weights=lambda s, v, m: masked_softmax(s * s.roll(-1, 2), v)),
    leak("finite_mask_value_added_to_large_scores", weights=lambda s, v, m: (2e4 * s - 1e3 * ~v).softmax(-1)),
    leak("temperature_from_all_scores", weights=lambda s, v, m: masked_softmax(s / s.abs().mean((-2, -1), True), v)),
    leak("largest_of_all_scores", weights=lambda s, v, m: masked_softmax(s, v & (largest(s) | eye(s)))),
    leak("attention_heads_that_choose_tokens", weights=chosen_tokens),
    leak("linformer_with_a_causal_flag", attend=linformer),
    leak("temperature_of_the_length", weights=lambda s, v, m: masked_softmax(s * math.log(1 + s.shape[-1]), v)),
    leak("positions_compared_in_the_dtype_of_the_model", unmasked=rounded_positions, context_length=264),
]


# --- Leaks of layers that mix positions or rows outside of the mask
def ahead(x: Tensor, distance: int = 1) -> Tensor:
    """(B, T, ...) shifted left, with zeros at the end."""
    return torch.cat([x[:, distance:], torch.zeros_like(x[:, :distance])], 1)


def convolution(left: int, right: int, kernel_size: int, **options: Any) -> Callable[..., nn.Module]:
    """A convolution over (B, T, C) with this padding; each position of a stride gets its output."""

    def mix(x: Tensor, conv: nn.Module) -> Tensor:
        return conv(F.pad(x.mT, (left, right))).mT.repeat_interleave(options.get("stride", 1), 1)[:, : x.shape[1]]

    return lambda: Mix(mix, conv=nn.Conv1d(C, C, kernel_size, **options))


def fft_convolution(x: Tensor, size: int) -> Tensor:
    """A convolution with a decaying filter through a Fourier transform of this size, (B, T, C)."""
    spectrum = torch.fft.rfft(x, size, dim=1) * torch.fft.rfft(0.5 ** steps(x)[:, None].to(x), size, dim=0)
    return torch.fft.irfft(spectrum, size, dim=1)[:, : x.shape[1]]


def recurrent(make: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Mix(lambda x, rnn: rnn(x)[0], rnn=make(C, batch_first=True, **options))


def norm_of_the_batch() -> nn.Module:
    return Mix(lambda x, norm: norm(x.mT).mT, norm=nn.BatchNorm1d(C))


def flattened() -> nn.Module:
    return Mix(lambda x, attn: attn(x.flatten(0, 1)[None]).view_as(x), attn=Attention())


def best(scores: Tensor, share: float, dim: int = 1) -> Tensor:
    """Mask of the largest `share` of the scores along a dimension."""
    number = max(1, round(share * scores.shape[dim]))
    return torch.zeros_like(scores, dtype=torch.bool).scatter(dim, scores.topk(number, dim).indices, True)


def experts(choose: Callable[[Tensor], Tensor] | None) -> Callable[[], nn.Module]:
    """A mixture of four experts; `choose`: router scores (B, T, E) -> weights; None: tokens are sent to experts."""

    def mix(x: Tensor, router: nn.Module, experts: nn.ModuleList) -> Tensor:
        outputs = torch.stack([expert(x) for expert in experts], -1)  # (B, T, C, E)
        return (outputs * choose(4 * router(x))[:, :, None]).sum(-1)

    layers = lambda: nn.ModuleList(mlp() for _ in range(4))  # noqa: E731
    return lambda: Mix(mix if choose else dispatched, router=nn.Linear(C, 4, bias=False), experts=layers())


def dispatched(x: Tensor, router: nn.Module, experts: nn.ModuleList) -> Tensor:
    """Each expert computes its tokens together, so their number, which hidden tokens decide, rounds differently."""
    tokens = x.flatten(0, 1)
    out, chosen = torch.zeros_like(tokens), router(tokens).argmax(-1)
    for i, expert in enumerate(experts):
        places = (chosen == i).nonzero()[:, 0]
        out = out.index_add(0, places, expert(tokens[places]))
    return out.view_as(x)


def capacity_of_the_batch(x: Tensor, m) -> Tensor:
    """An expert of the batch takes 24 tokens, in the order of the rows."""
    chosen = (m.x[..., :1] > 0).flatten(0, 1)
    return x * (chosen.cumsum(0) * chosen <= 24).view(*x.shape[:2], 1)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """8-bit numbers, with the gradient of the identity."""
    return x + ((x / scale * 127).round().clamp(-127, 127) / 127 * scale - x).detach()


def noisy(x: Tensor, m) -> Tensor:
    """Noise of 1e-2, new in every call whatever the random state, hides a leak of 1e-3."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(m.calls))
    return x + 1e-2 * noise.to(x) + 1e-3 * ahead(x)


def gpt(n_layers: int, context_length: int) -> nn.Module:
    sizes = {"vocab_size": V, "dim": C, "n_kv_heads": 2, "backend": "explicit"}
    return tiny_gpt(n_layers=n_layers, context_length=context_length, **sizes).train()


LAYERS = [
    leak("norm_over_time", mix=lambda x, m: (x - x.mean(1, True)) / (x.var(1, False, True) + 1e-5).sqrt()),
    leak("mean_of_the_sequence_added", mix=lambda x, m: x + x.mean(1, True)),
    leak("token_shift_by_a_roll", mix=lambda x, m: 0.5 * (x + x.roll(1, 1))),
    leak("detached_next_token", mix=lambda x, m: x + 0.1 * ahead(x.detach())),
    leak("next_token_in_one_channel", mix=lambda x, m: x + ahead(x) * (torch.arange(C) == 7)),
    leak("next_token_times_1e_6", mix=lambda x, m: x + 1e-6 * ahead(x)),
    leak("leak_below_the_rounding_of_float32", mix=lambda x, m: x + 1e-9 * ahead(x)),
    leak("noise_above_a_leak", mix=noisy),
    leak("straight_through_next_token", mix=lambda x, m: x + (ahead(x) - ahead(x).detach())),
    leak("buffer_of_zero_before_the_next_token", mix=lambda x, m: x + m.gate * ahead(x)),
    leak("aggregation_inside_a_block", mix=lambda x, m: x + (steps(x)[:, None] // 16 == steps(x) // 16).to(x) @ x / 16),
    leak("fft_convolution_without_zero_padding", mix=lambda x, m: fft_convolution(x, x.shape[1])),
    leak("same_padding_of_a_convolution", part=convolution(2, 2, 5)),
    leak("downsampling", part=convolution(1, 2, 3, stride=2)),
    leak("bidirectional_gru", ATTN, part=recurrent(nn.GRU, hidden_size=C // 2, bidirectional=True)),
    leak("experts_that_choose_their_tokens", part=experts(lambda scores: scores.softmax(-1) * best(scores, 0.25))),
    leak("mixture_of_depths", mix=lambda x, m: x * best(m.x[..., :1], 0.5)),
    leak("tokens_sorted_into_buckets", mix=lambda x, m: x + m.x * x[..., :1].argsort(1).argsort(1) / 99),
    leak("quantization_by_the_largest_value", mix=lambda x, m: rounded(x, x.abs().amax((1, 2), keepdim=True))),
    leak("scaled_by_the_length", mix=lambda x, m: 8 * x / x.shape[1]),
    leak("layer_skipped_in_long_inputs", "blocks.1", mix=lambda x, m: x if x.shape[1] <= 32 else m.x),
    leak("logits_scaled_by_the_length", "head", mix=lambda x, m: x * (1 + x.shape[1] / 100)),
    leak("positions_counted_from_the_end", "positions", mix=lambda x, m: x.flip(0)),
    leak("parity_of_the_length", "positions", mix=lambda x, m: x * (1 + len(x) % 2)),
    leak("position_40_sees_the_next", mix=lambda x, m: x + (steps(x) == 40)[:, None] * ahead(x)),
    leak("noise_scaled_by_the_sequence", mix=lambda x, m: x + m.training * x.std() * torch.randn_like(x)),
    leak("mixed_with_a_random_token", mix=lambda x, m: x + m.training * x[:, torch.randperm(x.shape[1])]),
    leak("batch_norm_in_training", "blocks.0.norm2", part=norm_of_the_batch),
    leak("rows_rolled", mix=lambda x, m: x + 0.1 * x.roll(1, 0)),
    leak("first_row_used_for_all", mix=lambda x, m: x + x[:1].cumsum(1) / (1 + steps(x)[:, None])),
    leak("small_change_by_the_batch_size", mix=lambda x, m: x * (1 + 1e-3 * (len(x) - 1))),
    leak("expert_capacity_shared_by_the_batch", mix=capacity_of_the_batch),
    leak("attention_over_the_flattened_batch", ATTN, part=flattened),
    leak("fourth_row_sees_the_next", mix=lambda x, m: x + ahead(x) * (number(x) == 3)),
    leak("even_batches_see_the_next", mix=lambda x, m: x + ahead(x) * (len(x) % 2 == 0)),
    leak("gpt_with_a_leak_of_1e_6", "blocks.1.attn", root=gpt, mix=lambda x, m: x + 1e-6 * ahead(x)),
    leak("gpt_scaled_in_long_inputs", ATTN, root=gpt, mix=lambda x, m: x * max(1.0, x.shape[1] / 40)),
]


# --- Leaks by certain tokens
def mark(name: str, marks: Callable[[Tensor], Tensor], **fields: Any) -> Row:
    """`marks`: ids (B, T) -> what is added to their embeddings."""
    mix = lambda x, m: x + marks(m.ids)[..., None] * torch.linspace(-2, 2, C).to(x)  # noqa: E731
    return leak(name, "embed", mix=mix, **fields)


TOKENS = [
    mark("end_of_text_announced", lambda ids: ahead(ids + 1) == EOT + 1),
    mark("repetition_announced", lambda ids: ahead(ids) == ids),
    mark("pair_announced", lambda ids: (ahead(ids) == 7) & (ahead(ids, 2) == 13), by_chance=True),
    mark("sum_of_two_later_tokens", lambda ids: ahead(ids) + ahead(ids, 2) == 2 * RARE - 1),
    mark("rare_token_counted", lambda ids: (ids == RARE).sum(1, keepdim=True).expand_as(ids)),
    mark("length_without_padding", lambda ids: (ids != PADDING).sum(1, keepdim=True).expand_as(ids) / 9),
    mark("masked_token_replaced_by_the_next", lambda ids: (ids == 3) * ahead(ids)),
]


# --- Caches of keys and values: right without it, and wrong in decoding or in a prefill of several steps
def cached(name: str, leaks: bool = True, **changes: Any) -> Row:
    expected = window(15) if "rule" in changes else None
    return Row(name, leaks, "cached", functools.partial(CachedNet, **changes), expected=expected)


def window_of_8(q, k, n=0):
    return (k <= q) & (k > q - 8)


CACHES = [
    cached("second_chunk_off_by_one", see=lambda q, k, n: k <= q + (n > 0)),
    cached("cache_with_unwritten_positions", room=CONTEXT_LENGTH, see=lambda q, k, n: (k <= q) | (k > q[-1])),
    cached("positions_start_again_in_each_chunk", start=lambda n: 0),
    cached("cache_that_keeps_its_older_half", keep=lambda x: x[:, :24]),
    cached("cache_of_another_row", keep=lambda x: x.roll(1, 0)),
    cached("window_forgotten_with_a_cache", rule=window_of_8, see=lambda q, k, n: k <= q),
    cached("cache_scaled_by_its_largest_number", keep=lambda x: rounded(x, x.abs().amax((1, 2), keepdim=True))),
    cached("cache_shared_between_calls", shared=True),
    cached("prefill_without_a_mask", see=lambda q, k, n: everywhere(q, k)),
    cached("no_mask_after_32_cached_tokens", see=lambda q, k, n: causal(q, k) | torch.tensor(n >= 32)),
    cached("mask_aligned_with_the_first_key", see=lambda q, k, n: k <= q - n),
    cached("cached_sliding_window", False, rule=window_of_8),
    cached("cache_of_fixed_size", False, room=CONTEXT_LENGTH),
]


# --- Correct models
def pattern(name: str, rule: Callable[..., Tensor], *, n_layers: int = 1, expected=None) -> Row:
    """A model whose every layer has this rule, which is what it is expected to see in one layer."""
    sees = expected or (lambda length: rule(torch.arange(length)[:, None], torch.arange(length)).bool())
    return correct(name, "blocks.*.attn", rule=rule, n_layers=n_layers, expected=sees)


def cumulative_sums(q, k, v, m):
    """Linear attention by cumulative sums of keys times values."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    sums = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)  # (B, H, T, D, D)
    return torch.einsum("bhtd,bhtde->bhte", q, sums) / (q * k.cumsum(2)).sum(-1, keepdim=True)


def in_order(scores: Tensor) -> Tensor:
    """An expert takes the first six tokens that choose it."""
    chosen = best(scores, 0, dim=-1)
    return chosen * (chosen.cumsum(1) <= 6)


def stabilized(x, m):
    """A softmax-weighted mean of the past; the maximum of the whole sequence cancels, up to rounding."""
    powers = (x - x.amax(1, keepdim=True)).exp()
    return (powers * x).cumsum(1) / powers.cumsum(1)


def float32_only(model):
    """Embeddings and positions are float32 whatever the weights are, so the model fails in float64."""
    for part in (model.embed, model.positions):
        part.register_forward_hook(lambda module, inputs, out: out.float())


class TorchAttention(nn.MultiheadAttention):
    """Its boolean mask is True where a key is hidden."""

    def forward(self, x):
        return super().forward(x, x, x, attn_mask=square(x).triu(1), need_weights=False)[0]


class Flat(nn.Embedding):
    """Fails for a slice of a larger tensor."""

    def forward(self, input):
        return super().forward(input.view(-1)).view(*input.shape, -1)


def gpt2_of_transformers(**_):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": V, "n_positions": CONTEXT_LENGTH, "n_embd": C, "n_layer": 1, "n_head": H}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **sizes))


def returns(container: Callable[[Tensor], Any]) -> Callable[[], Any]:
    return lambda: Mix(lambda ids, model: container(model(ids)), model=net())


NO_POSITIONS = {"edit": lambda net: setattr(net, "positions", Mix(lambda x: 0.0))}
IN_PLACE = {"part": lambda: Mix(lambda ids, table: table(ids).mul_(2.0), table=nn.Embedding(V, C))}
CORRECT = [
    pattern("sliding_window", window_of_8),
    pattern("two_layers_of_sliding_windows", window_of_8, n_layers=2, expected=window(15)),
    pattern("two_tokens_of_lookahead", lambda q, k: k <= q + 2),
    pattern("encoder", everywhere),
    correct("window_below_a_full_layer", rule=window_of_8),
    pattern("attention_sinks_and_a_window", lambda q, k: (k <= q) & ((k < 4) | (k > q - 8))),
    pattern("prefix_language_model", lambda q, k: (k <= q) | (k < 8) & (q < 8), n_layers=2),
    pattern("each_token_alone", lambda q, k: k == q),
    correct("causal_attention", rule=causal),
    correct("scores_of_a_thousand", weights=lambda s, v, m: masked_softmax(2e3 * s, v)),
    correct("no_softmax", weights=lambda s, v, m: s * v),
    correct("finite_mask_value_far_below_the_scores", weights=lambda s, v, m: (s - 1e4 * ~v).softmax(-1)),
    correct("scores_in_float64", weights=lambda s, v, m: masked_softmax(s.double(), v).to(s.dtype)),
    correct("largest_visible_scores", weights=lambda s, v, m: masked_softmax(s, largest(s.masked_fill(~v, -99.0)) & v)),
    correct("temperature_of_the_visible_length", weights=lambda s, v, m: masked_softmax(s * v.sum(-1, True) / 9, v)),
    correct("fused_attention", attend=sdpa),
    correct("attention_of_torch", ATTN, part=lambda: TorchAttention(C, H, dropout=0.1, batch_first=True)),
    correct("cumulative_linear_attention", attend=cumulative_sums),
    correct("lstm", ATTN, part=recurrent(nn.LSTM, hidden_size=C), n_layers=1, **NO_POSITIONS),
    correct("lstm_with_dropout", ATTN, part=recurrent(nn.LSTM, hidden_size=C, num_layers=2, dropout=0.1), n_layers=1),
    correct("dilated_convolution", part=convolution(8, 0, 3, dilation=4, groups=C)),
    correct("downsampling_with_enough_padding", part=convolution(2, 1, 3, stride=2)),
    correct("fft_convolution_with_zero_padding", mix=lambda x, m: fft_convolution(x, 2 * x.shape[1])),
    correct("convolution_only", "blocks.*.attn", part=convolution(3, 0, 4), n_layers=4, expected=window(13)),
    correct("token_choice_top_2", part=experts(lambda s: masked_softmax(s, best(s, 0.5, dim=-1)))),
    correct("tokens_dispatched_to_experts", part=experts(None)),
    correct("capacity_in_the_order_of_the_tokens", part=experts(in_order)),
    correct("depth_by_a_threshold", mix=lambda x, m: x * (m.x[..., :1] > 0)),
    correct("cumulative_maximum", mix=lambda x, m: x.cummax(1).values),
    correct("token_shift_from_the_past", mix=lambda x, m: F.pad(x, (0, 0, 1, -1))),
    correct("max_stabilized_cumulative_softmax", mix=stabilized),
    correct("quantization_of_each_token", mix=lambda x, m: rounded(x, x.abs().amax(-1, keepdim=True))),
    correct("logits_of_a_thousand", "head", mix=lambda x, m: 1000 * x),
    correct("gpt", ATTN, root=gpt),
    correct("gpt2_of_transformers", root=gpt2_of_transformers),
    correct("weights_in_bfloat16", edit=lambda net: net.bfloat16()),
    correct("float32_only", edit=float32_only),
    correct("dropout_in_training", mix=lambda x, m: F.dropout(x, 0.2, m.training)),
    correct("stochastic_depth", mix=lambda x, m: x * (torch.rand(()) > 0.3) if m.training else x),
    correct("buffer_of_zero_before_its_own_token", mix=lambda x, m: x + m.gate * x),
    correct("call_counter_without_effect", mix=lambda x, m: m.gate.add_(1) * 0 + x),
    correct("needs_contiguous_ids", "embed", part=lambda: Flat(V, C)),
    correct("writes_into_its_embeddings", "embed", **IN_PLACE),
    Row("without_gradients", False, "logits", lambda: Mix(torch.no_grad()(lambda ids, model: model(ids)), model=net())),
    Row("compiled_module", False, "logits", lambda: torch.compile(net(), backend="eager", dynamic=True)),
    Row("plain_function", False, "logits", lambda: lambda ids: F.one_hot(ids, V).double().cumsum(1).log1p()),
    Row("returns_a_dictionary", False, "logits", returns(lambda logits: {"loss": None, "logits": logits})),
    Row("returns_a_tuple", False, "logits", returns(lambda logits: (logits, None))),
    Row("returns_an_object", False, "logits", returns(lambda logits: SimpleNamespace(logits=logits))),
]


# --- Training pipelines
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, T, V) and (B, T) -> (B, T), 0 where ignored."""
    return F.cross_entropy(logits.mT, targets, ignore_index=-100, reduction="none")


def pipeline(name: str, losses=None, *, pair=None, size: int = 33, leaks: bool = True, **changes: Any) -> Row:
    """What trains and validates a model, whose mode decides between the two.

    An object with `model`, `batches`: tokens (N,) and a generator -> inputs and targets of one epoch, and `losses`:
    inputs and targets (B, T) -> nats of each target (B, T), 0 where it is -100.

    Args:
        losses: model, inputs, targets -> losses.
        pair: a window (B, `size`) and the number of its batch -> inputs and targets.
        changes: of the model, as `net` takes them.
    """
    pair = pair or (lambda rows, i: (rows[:, :-1], rows[:, 1:]))
    losses = losses or (lambda m, x, y: cross_entropy(m(x), y))

    def batches(tokens: Tensor, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        rows = tokens[: len(tokens) // size * size].view(-1, size)
        for i, chosen in enumerate(torch.randperm(len(rows), generator=generator).split(8)):
            yield pair(rows[chosen], i)

    def make() -> SimpleNamespace:
        model = net(ATTN, **changes)
        return SimpleNamespace(model=model, batches=batches, losses=functools.partial(losses, model))

    return Row(name, leaks, "pipeline", make)


def hashed_bigrams(m, x, y):
    """The count of a hashed pair, whose key contains the target, is divided by the count of the first token."""
    estimate = (1 + (7 * x + 3 * y) % 8) / (1 + x % 16)
    return -(0.8 * (-cross_entropy(m(x), y)).exp() + 0.2 * estimate.clamp(max=1)).log() * (y >= 0)


def by_documents(starts: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Losses within documents, which start where `starts` of inputs and targets (B, T) is True."""

    def losses(m: Any, x: Tensor, y: Tensor) -> Tensor:
        m.blocks[0].attn.starts = starts(x, y)
        return cross_entropy(m(x), y)

    return losses


def answer_in_the_prompt(rows, i):
    """The targets of the prompt are ignored, and its inputs hold the answer that follows."""
    answer = rows[:, :16]
    inputs = torch.cat([answer, torch.ones_like(answer[:, :1]), answer[:, :-1]], 1)
    return inputs, torch.cat([torch.full_like(answer, -100), answer], 1)


def prompt_ignored(rows, i):
    return rows[:, :-1], rows[:, 1:].masked_fill(torch.arange(32) < 8, -100)


WITHIN_DOCUMENTS = {
    "rule": lambda q, k: (q < 0) & (k < 0),
    "unmasked": lambda m: causal(steps(m.x)[:, None], steps(m.x)) & same_document(m, m.starts),
}
PIPELINES = [
    pipeline("logits_scaled_by_all_targets", lambda m, x, y: cross_entropy(m(x) * (1 + y.sum() % 7 / 99), y)),
    pipeline("losses_scaled_in_training", lambda m, x, y: cross_entropy(m(x), y) * (1 - 0.1 * m.training)),
    pipeline("targets_as_inputs", lambda m, x, y: cross_entropy(m(torch.where(steps(x) % 3 == 2, y.clamp(0), x)), y)),
    pipeline("losses_mixed_over_time", lambda m, x, y: 0.5 * ((loss := cross_entropy(m(x), y)) + loss.roll(-1, 1))),
    pipeline("hard_targets_dropped", lambda m, x, y: (loss := cross_entropy(m(x), y)) * (loss < 4.5)),
    pipeline("better_of_two_heads", lambda m, x, y: cross_entropy(m(x), y).minimum(cross_entropy(m(x).roll(1, -1), y))),
    pipeline("bigram_key_with_its_target", hashed_bigrams),
    pipeline("validation_without_the_mask", unmasked=lambda m: not m.training),
    pipeline("labels_not_shifted", pair=lambda rows, i: (rows[:, :-1], rows[:, :-1])),
    pipeline("targets_rolled", pair=lambda rows, i: (rows, rows.roll(-1, 1)), size=32),
    pipeline("packing_without_the_shift", pair=lambda rows, i: (rows[:, :-1], rows[:, :-1] if i % 2 else rows[:, 1:])),
    pipeline("answers_inside_of_the_inputs", pair=answer_in_the_prompt),
    pipeline("inputs_reversed_and_targets_not", pair=lambda rows, i: (rows[:, :-1].flip(1), rows[:, 1:])),
    pipeline("documents_split_by_the_targets", by_documents(lambda x, y: y == EOT), **WITHIN_DOCUMENTS),
    pipeline("shifted_by_one", leaks=False),
    pipeline("dropout_in_the_pipeline", edit=lambda n: n.blocks[0].mlp.append(nn.Dropout(0.2)), leaks=False),
    pipeline("two_tokens_ahead", pair=lambda rows, i: (rows[:, :-2], rows[:, 2:]), size=34, leaks=False),
    pipeline("packed_documents", by_documents(lambda x, y: x == EOT), leaks=False, **WITHIN_DOCUMENTS),
    pipeline("prompt_ignored", pair=prompt_ignored, leaks=False),
]


ROWS = [*MASKS, *SCORES, *LAYERS, *TOKENS, *CACHES, *CORRECT, *PIPELINES]


def each(*kinds: str, leaks: tuple[bool, ...] = (True, False), by_chance: bool = True) -> Any:
    """Parametrizes a test with the rows of these kinds; every fourth leak and every twelfth other row is not slow.

    Args:
        by_chance: also with the leaks that the certificate finds with some seeds only.
    """

    def parameter(i: int, row: Row) -> Any:
        short = i % (4 if row.leaks else 12) == 0 and row.context_length <= CONTEXT_LENGTH
        return pytest.param(row, id=row.name, marks=[pytest.mark.slow] * (not short))

    chosen = [(i, row) for i, row in enumerate(ROWS) if row.kind in kinds and row.leaks in leaks]
    found = [parameter(i, row) for i, row in chosen if by_chance or not row.by_chance]
    return pytest.mark.parametrize("row", found)
