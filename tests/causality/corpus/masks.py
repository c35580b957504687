"""Leaks of attention: its mask, windows, documents, scores and softmax.

B batch, T queries, S keys, H query heads.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.causality.corpus.net import (
    END_OF_TEXT,
    PADDING,
    SEPARATOR,
    Attention,
    C,
    H,
    Mix,
    V,
    causal,
    everywhere,
    leak,
    masked_softmax,
    replace_part,
    steps,
)
from tests.causality.corpus.table import Trigger


def window(width: int):
    """T -> (T, T) bool: the own position and the width - 1 before it."""
    return lambda length: torch.ones(length, length).tril().triu(1 - width).bool()


NO_POSITIONS = {"edit": lambda net: replace_part(net, positions=Mix(torch.zeros_like))}
ROWS = Trigger(batch=4)


def heads(*chosen: int) -> Tensor:
    """(H, 1, 1) bool."""
    return torch.isin(torch.arange(H), torch.tensor(chosen))[:, None, None]


leak("no_mask", rule=everywhere)
leak("mask_off_by_one", rule=lambda q, k: k <= q + 1)
leak("mask_of_blocks", rule=lambda q, k: k // 8 <= q // 8)
leak("mask_joined_by_or", rule=lambda q, k: (k <= q) | ((q - k).abs() < 4))
leak("mask_open_at_one_boundary", rule=lambda q, k: (k <= q) | (q == 31) & (k == 32), when=Trigger(length=40, cut=32))
leak("mask_open_at_chunk_boundaries", rule=lambda q, k: (k <= q) | (k == q + 1) & (k % 16 == 0), when=Trigger(cut=16))
leak("mask_missing_in_one_head", rule=lambda q, k: causal(q, k) | heads(2))
leak("mask_missing_in_one_query_group", rule=lambda q, k: causal(q, k) | heads(2, 3), n_kv_heads=2)


def mask_of_32(q, k):
    """A buffer of 32 positions, padded with True."""
    more = max(0, len(k) - 32)
    return F.pad(causal(q, k)[:32, :32], (0, more, 0, more), value=True)


leak("mask_buffer_of_a_shorter_context", rule=mask_of_32, when=Trigger(length=48))

# Published: decoders that were given the mask of an encoder, and flags that were inverted, dropped or not passed on
ENCODER = {"rule": everywhere, "source": "huggingface/transformers/issues/48745"}
leak("big_bird_with_an_encoder_mask", **ENCODER | {"rule": lambda q, k: (k < 8) | ((q // 8 - k // 8).abs() <= 1)})
leak(
    "megatron_bert_with_an_encoder_mask",
    edit=lambda net: replace_part(net.blocks[1], attn=Attention(everywhere)),
    **ENCODER,
)
leak(
    "rembert_with_an_encoder_mask",
    edit=lambda net: replace_part(net, embed=nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, C))),
    **ENCODER,
)
leak("roformer_with_an_encoder_mask", turn=lambda x: rotated(x, 10_000.0), **NO_POSITIONS, **ENCODER)
INVERTED = "huggingface/transformers/pull/38094"  # an additive mask is converted to bool, where True means visible
leak("llama4_with_an_inverted_mask", rule=lambda q, k: (k > q) | (q == len(k) - 1), source=INVERTED)


class UpperTriangle(Attention):
    """`triu` marks what to hide, and scaled_dot_product_attention shows what is True."""

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.merge(F.scaled_dot_product_attention(*self.heads(x), attn_mask=mask).nan_to_num())


SHOWN_FOR_HIDDEN, KERAS = "rasbt/LLMs-from-scratch/pull/1062", "keras-team/keras/issues/23038"
leak("triangle_of_masked_keys_passed_to_sdpa", "blocks.0.attn", part=UpperTriangle, source=SHOWN_FOR_HIDDEN)
leak("causal_flag_dropped_with_returned_scores", rule=everywhere, source=KERAS)
leak(
    "causal_flag_dropped_with_dropout",
    unmasked=lambda m: m.training,
    weights=lambda s, v, m: F.dropout(masked_softmax(s, v), 0.1, m.training),
    when=Trigger(training=True),
    source=KERAS,
)
PADDED = {"unmasked": lambda m: (m.ids == PADDING).any(1), "when": Trigger(tokens=(PADDING,))}
leak("causal_flag_dropped_with_a_padding_mask", **PADDED, source="keras-team/keras/pull/23040")
NOT_FORWARDED = {"part": lambda: nn.Sequential(Attention(everywhere)), "source": "keras-team/keras/issues/21284"}
leak("causal_flag_not_forwarded", "blocks.0.attn", **NOT_FORWARDED)

# Windows
leak("window_on_both_sides", rule=lambda q, k: (q - k).abs() < 8)
leak("window_one_too_wide", rule=lambda q, k: (k <= q) & (k >= q - 8), n_layers=1, expected=window(8))
leak("window_forgotten", rule=causal, n_layers=1, expected=window(8))
leak(
    "window_forgotten_in_long_inputs",
    rule=lambda q, k: (k <= q) & ((k > q - 8) | torch.tensor(len(k) > 40)),
    n_layers=1,
    expected=window(8),
    when=Trigger(length=48),
)


def same_document(m, starts: Tensor | None = None) -> Tensor:
    """(B, 1, T, T): documents start at an end of text, or where `starts` (B, T) is True."""
    document = (m.ids == END_OF_TEXT if starts is None else starts).cumsum(1)
    return document[:, None, :, None] == document[:, None, None, :]


leak("document_mask_joined_by_or", unmasked=same_document)
leak("other_documents_seen_without_the_mask", unmasked=lambda m: ~same_document(m), when=Trigger(tokens=(END_OF_TEXT,)))
leak(
    "mask_dropped_with_three_documents",
    unmasked=lambda m: same_document(m) & ((m.ids == END_OF_TEXT).sum(1) > 1)[:, None, None, None],
    when=Trigger(tokens=(END_OF_TEXT, END_OF_TEXT)),
)

# Scores and softmax
leak("multiplied_after_the_softmax", weights=lambda s, v, m: s.softmax(-1) * v)
leak(  # as in ProphetNet
    "scores_scaled_by_the_next_query",
    weights=lambda s, v, m: masked_softmax(s * s.diagonal(0, 2, 3).roll(-1, 2)[..., None], v),
)
leak("softmax_over_the_queries", weights=lambda s, v, m: masked_softmax(s.mT, v.mT).mT)
leak("finite_mask_value_added_to_large_scores", weights=lambda s, v, m: (s - 1000.0 * ~v).softmax(-1), scale=1e4)
leak("mask_value_of_minus_ten", weights=lambda s, v, m: (s - 10.0 * ~v).softmax(-1))
leak("temperature_from_all_scores", weights=lambda s, v, m: masked_softmax(s / s.abs().mean((-2, -1), True), v))


def own(s: Tensor) -> Tensor:
    return torch.eye(s.shape[-1], dtype=torch.bool, device=s.device)


def largest(s: Tensor) -> Tensor:
    return s >= s.topk(min(4, s.shape[-1]), -1).values[..., -1:]


leak("largest_scores_chosen_before_the_mask", weights=lambda s, v, m: masked_softmax(s, v & (largest(s) | own(s))))


def with_epsilon(s, v, m):
    """An epsilon next to powers that are scaled by the maximum over hidden keys too."""
    powers = (s - s.amax(-1, keepdim=True)).exp() * v
    return powers / (powers.sum(-1, keepdim=True) + 1e-3)


leak("epsilon_beside_the_largest_hidden_score", weights=with_epsilon, scale=2.0)
leak(
    "mask_that_fades_in_training",
    weights=lambda s, v, m: s.where(v, s - 50 / max(m.calls - 5, 0.01) if m.training else -math.inf).softmax(-1),
    when=Trigger(calls=20, training=True),
)


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary positions on (B, H, T, D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] / base ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


# The total length is one bit of the future for each length
leak("temperature_of_the_total_length", weights=lambda s, v, m: masked_softmax(s * math.log(1 + s.shape[-1]), v))
leak("window_of_half_the_length", rule=lambda q, k: (k <= q) & (2 * (q - k) <= len(k)))
leak("rotary_base_of_the_total_length", turn=lambda x: rotated(x, 100.0 * max(1.0, x.shape[-2] / 8)))
leak(
    "rotary_base_switched_in_long_inputs",
    turn=lambda x: rotated(x, 100.0 if x.shape[-2] <= 32 else 10_000.0),
    when=Trigger(length=40, cut=20),
)

# The mask is missing under a condition
ABOVE = {
    "unmasked_above_64": (lambda n: n > 64, 96, 80),
    "unmasked_above_256": (lambda n: n > 256, 320, 300),
    "unmasked_at_multiples_of_64": (lambda n: n % 64 == 0, 200, 128),
    "unmasked_from_100_to_150": (lambda n: 100 <= n <= 150, 192, 120),
    "unmasked_at_the_full_context": (lambda n: n == 97, 97, 97),
    "unmasked_at_primes_above_30": (lambda n: n in (31, 37, 41, 43, 47, 53, 59, 61), 64, 37),
    "unmasked_below_5": (lambda n: n < 5, 64, 3),
    "unmasked_at_odd_lengths": (lambda n: n % 2 == 1, 64, None),
}
for name, (condition, context_length, length) in ABOVE.items():
    leak(
        name,
        unmasked=lambda m, condition=condition: condition(m.ids.shape[1]),
        context_length=context_length,
        when=Trigger(length=length),
    )
MODES = {
    "unmasked_in_training": (lambda m: m.training, Trigger(training=True)),
    "unmasked_in_training_above_37": (lambda m: m.training and m.x.shape[1] > 37, Trigger(training=True, length=48)),
    "unmasked_in_evaluation": (lambda m: not m.training, Trigger(training=False)),
    "unmasked_without_gradients": (lambda m: not torch.is_grad_enabled(), Trigger()),
    "unmasked_with_gradients": (lambda m: torch.is_grad_enabled(), Trigger(grad=True)),
    "unmasked_in_bfloat16": (lambda m: m.x.dtype == torch.bfloat16, Trigger(dtype=torch.bfloat16)),
    "unmasked_in_float32": (lambda m: m.x.dtype == torch.float32, Trigger(dtype=torch.float32)),
    "unmasked_under_autocast": (lambda m: torch.is_autocast_enabled("cpu"), Trigger(autocast=True)),
    "mask_that_comes_off_after_500_calls": (lambda m: m.calls > 500, Trigger(calls=500)),
    "mask_missing_in_every_seventh_call": (lambda m: m.calls % 7 == 0, Trigger(calls=6)),
    "mask_dropped_with_an_end_of_text": (lambda m: (m.ids == 0).any(1), Trigger(tokens=(END_OF_TEXT,))),
    "mask_dropped_with_a_separator": (lambda m: (m.ids == 1).any(1), Trigger(tokens=(SEPARATOR,))),
    "mask_dropped_with_a_token_three_times_in_a_row": (
        lambda m: (m.ids.unfold(1, min(3, m.ids.shape[1]), 1).diff(dim=-1) == 0).all(-1).any(1),
        Trigger(tokens=(5, 5, 5)),
    ),
    "padding_mask_replaces_the_causal_mask": (
        lambda m: ((m.ids == PADDING).any(1, keepdim=True) & (m.ids != PADDING))[:, None, None],
        Trigger(tokens=(PADDING,)),
    ),
    # Row b sees the first b + 1 tokens of all
    "mask_of_the_wrong_dimension": (lambda m: steps(m.x) <= torch.arange(len(m.x))[:, None, None, None], ROWS),
}
for name, (condition, when) in MODES.items():
    leak(name, unmasked=condition, when=when)
leak(  # bf16 rounds 257 to 256
    "positions_compared_in_the_dtype_of_the_model",
    unmasked=lambda m: steps(m.x).to(m.x.dtype) <= steps(m.x).to(m.x.dtype)[:, None],
    context_length=320,
    when=Trigger(dtype=torch.bfloat16, length=320, cut=257),
)
leak(
    "projection_of_zeros_behind_an_open_mask",
    rule=everywhere,
    edit=lambda net: nn.init.zeros_(net.blocks[0].attn.o_proj.weight),
    when=Trigger(values={"blocks.0.attn.o_proj.weight": 1.0}),
)
