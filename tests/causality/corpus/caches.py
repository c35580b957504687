"""Models with a cache of keys and values: right without it, and wrong in decoding or in a prefill of several steps.

B batch, T queries, S keys (cached ones and those of the queries), H heads, D head size.
"""

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.causality.corpus.masks import window
from tests.causality.corpus.net import Attention, Net, causal, masked_softmax
from tests.causality.corpus.table import CONTEXT_LENGTH, Entry, add

Layer = tuple[Tensor, Tensor]  # keys and values, (B, H, S, D) each


class CachedAttention(Attention):
    """Attention to the cached keys and its own.

    Args:
        see: positions of queries and of keys in the cache, number of cached keys -> (T, S) bool.
        keep: a cached tensor (B, H, S, D) -> what is stored.
        room: number of positions of the cache, if it is larger than its keys.
        unwritten: positions without a key are visible.
    """

    def __init__(self, rule=causal, see=None, keep=lambda x: x, room: int = 0, unwritten: bool = False):
        super().__init__(rule)
        self.see, self.keep, self.room, self.unwritten = see or (lambda q, k, n: rule(q, k)), keep, room, unwritten

    def extended(self, x: Tensor, past: Layer | None) -> tuple[Tensor, Layer]:
        q, k, v = self.heads(x)
        n_cached = 0
        if past is not None:
            n_cached = past[0].shape[2]
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)  # (B, H, S, D)
        n_keys, more = k.shape[2], max(0, self.room - k.shape[2])
        key = torch.arange(n_keys)
        visible = F.pad(self.see(key[n_cached:, None], key, n_cached), (0, more), value=self.unwritten)
        padded = (F.pad(part, (0, 0, 0, more)) for part in (k, v))
        out = masked_softmax(self.scores(q, next(padded)), visible) @ next(padded)
        return self.merge(out), (self.keep(k), self.keep(v))


class CachedNet(Net):
    """The model with the arguments and outputs of a `transformers` model.

    Args:
        start: number of cached tokens -> position of the first new one.
        shared: a call without a cache begins with the first token of the call before.
    """

    def __init__(self, start=lambda n: n, shared: bool = False, **attention: Any):
        super().__init__(context_length=CONTEXT_LENGTH + shared)
        self.start, self.shared, self.last = start, shared, None
        for block in self.blocks:
            block.attn = CachedAttention(**attention)

    def forward(self, input_ids: Tensor, past_key_values=None, use_cache: bool = False) -> SimpleNamespace:
        cached = use_cache or past_key_values is not None
        if self.shared and use_cache and past_key_values is None and self.last is not None:
            past_key_values = [(k[: len(input_ids), :, :1], v[: len(input_ids), :, :1]) for k, v in self.last]
        start = self.start(0 if past_key_values is None else past_key_values[0][0].shape[2])
        x, cache = self.embed(input_ids), []
        x = x + self.positions.table[start : start + x.shape[1]]
        for i, block in enumerate(self.blocks):
            out, layer = block.attn(block.norm1(x)), None
            if cached:
                out, layer = block.attn.extended(block.norm1(x), past_key_values[i] if past_key_values else None)
            cache.append(layer)
            x = x + out
            x = x + block.mlp(block.norm2(x))
        if self.shared and cached:
            self.last = [(k.detach(), v.detach()) for k, v in cache]
        return SimpleNamespace(logits=self.head(self.norm(x)), past_key_values=cache if cached else None)


def scaled_by_the_largest(x: Tensor) -> Tensor:
    """A few bits with one scale for all that the cache holds."""
    scale = x.abs().amax((1, 2, 3), keepdim=True) / 7
    return (x / scale).round() * scale


def window_of_8(q, k, n=0):
    return (k <= q) & (k > q - 8)


EVERY = lambda q, k, n: (q >= 0) & (k >= 0)  # noqa: E731
LEAKS: dict[str, dict[str, Any]] = {
    "second_chunk_off_by_one": {"see": lambda q, k, n: k <= q + (n > 0)},
    "no_mask_inside_later_chunks": {"see": lambda q, k, n: (k <= q) | (k >= n) & (n > 0)},
    "cache_with_unwritten_positions": {"room": CONTEXT_LENGTH, "unwritten": True},
    "positions_start_again_in_each_chunk": {"start": lambda n: 0, "place": ""},
    "positions_one_too_small": {"start": lambda n: max(0, n - 1), "place": ""},
    "cache_that_keeps_its_older_half": {"keep": lambda x: x[:, :, :24]},
    "cache_of_another_row": {"keep": lambda x: x.roll(1, 0)},
    "window_forgotten_with_a_cache": {"rule": window_of_8, "see": lambda q, k, n: k <= q, "expected": window(15)},
    "cache_scaled_by_its_largest_key": {"keep": scaled_by_the_largest},
    "cache_shared_between_calls": {"shared": True, "place": ""},
    "prefill_without_a_mask": {"see": EVERY, "source": "Mikyx-1/TinyLLM/issues/17"},
    "chunk_without_a_mask_after_32_cached_tokens": {
        "see": lambda q, k, n: (k <= q) | torch.tensor(n >= 32),
        "source": "tenstorrent/tt-metal/issues/48899",
    },
    "mask_aligned_with_the_first_key": {"see": lambda q, k, n: k <= q - n, "source": "pytorch/executorch/pull/21749"},
}
CORRECT: dict[str, dict[str, Any]] = {
    "cached_attention": {},
    "cached_sliding_window": {"rule": window_of_8, "expected": window(15)},
    "cache_of_fixed_size": {"room": CONTEXT_LENGTH},
}
for rows, leaks in ((LEAKS, True), (CORRECT, False)):
    for name, changes in rows.items():
        row: dict[str, Any] = {"place": "blocks.0.attn"} if leaks else {}
        row |= {key: changes.pop(key) for key in ("place", "source", "expected") if key in changes}
        add(Entry(name, leaks, "cached", functools.partial(CachedNet, **changes), **row))
