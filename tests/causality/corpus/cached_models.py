"""Models with a cache of keys and values: right without it, and wrong in decoding or in a prefill of several steps.

B batch, T queries, S keys (cached ones and those of the queries), H heads, D head size, C width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from tests.causality.corpus.backbone import DIM, Attention, Backbone, Positions, masked_softmax, window
from tests.causality.corpus.entry import CONTEXT_LENGTH, VOCAB_SIZE, correct, leak

GITHUB = "https://github.com"
CACHE = {"family": "cache", "interface": "cached"}
ATTENTION = CACHE | {"place": "blocks.0.attn"}
RIGHT = {"family": "look-alike: cache", "interface": "cached"}
Layer = tuple[Tensor, Tensor]  # keys and values, (B, H, S, D) each


@dataclass
class CachedOutput:
    """logits (B, T, V), and the cache of each layer, None without one."""

    logits: Tensor
    past_key_values: tuple[Layer, ...] | None


class CachedAttention(Attention):
    """Attention to the cached keys and its own. Subclasses change `visible_keys` and `store`."""

    def extended(self, x: Tensor, past: Layer | None) -> tuple[Tensor, Layer]:
        q, k, v = self.heads(x)
        n_cached = 0 if past is None else past[0].shape[2]
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)  # (B, H, S, D)
        key = torch.arange(k.shape[2], device=x.device)
        visible = self.visible_keys(key[n_cached:, None], key, n_cached)
        out = self.merge(masked_softmax(self.scores(q, k), visible) @ v)
        return out, self.store(k, v)

    def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
        """(T, S) mask of positions in the cache."""
        return self.rule(query, key)

    def store(self, k: Tensor, v: Tensor) -> Layer:
        return k, v


class CachedBackbone(Backbone):
    """The backbone with the arguments and outputs of a `transformers` model."""

    def __init__(self, attention: type[CachedAttention] = CachedAttention, **options):
        super().__init__(**options)
        for layer in range(len(self.blocks)):
            self.block(layer).attn = attention()

    def first_position(self, past_key_values: tuple[Layer, ...] | None) -> int:
        return 0 if past_key_values is None else past_key_values[0][0].shape[2]

    def forward(
        self, input_ids: Tensor, past_key_values: tuple[Layer, ...] | None = None, use_cache: bool = False
    ) -> CachedOutput:
        start, cache = self.first_position(past_key_values), []
        x = self.embed(input_ids)
        x = x + cast(Positions, self.positions).table[start : start + x.shape[1]]
        for i in range(len(self.blocks)):
            block = self.block(i)
            normed = block.norm1(x)
            if use_cache or past_key_values is not None:
                out, layer = cast(CachedAttention, block.attn).extended(
                    normed, past_key_values[i] if past_key_values else None
                )
                cache.append(layer)
            else:
                out = block.attn(normed)
            x = x + out
            x = x + block.mlp(block.norm2(x))
        return CachedOutput(self.head(self.norm(x)), tuple(cache) or None)


@leak(**ATTENTION, reference=f"{GITHUB}/Mikyx-1/TinyLLM/issues/17")
def prefill_without_a_mask():
    """With a cache attached no mask is applied, so the tokens of a prompt see each other."""

    class Unmasked(CachedAttention):
        def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
            return torch.ones_like(query + key, dtype=torch.bool)

    return CachedBackbone(Unmasked)


@leak(**ATTENTION, reference=f"{GITHUB}/tenstorrent/tt-metal/issues/48899")
def chunk_without_a_mask_after_32_cached_tokens():
    """Once the cache holds a whole block of 32, the queries of a chunk see all of that chunk."""

    class Unmasked(CachedAttention):
        def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
            return (key <= query) | torch.tensor(n_cached >= 32, device=key.device)

    return CachedBackbone(Unmasked)


@leak(**ATTENTION, reference=f"{GITHUB}/pytorch/executorch/pull/21749")
def mask_aligned_with_the_first_key():
    """The mask of a chunk is aligned with the upper left corner, which hides the cached keys."""

    class UpperLeft(CachedAttention):
        def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
            return key <= query - n_cached

    return CachedBackbone(UpperLeft)


@leak(**ATTENTION)
def second_chunk_off_by_one():
    """From the second chunk on, each query sees one key too many."""

    class OffByOne(CachedAttention):
        def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
            return key <= query + (n_cached > 0)

    return CachedBackbone(OffByOne)


@leak(**ATTENTION)
def no_mask_inside_later_chunks():
    """A chunk after the first one sees the cache and all of itself."""

    class Unmasked(CachedAttention):
        def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
            return (key <= query) | (key >= n_cached) & (query >= n_cached) & (n_cached > 0)

    return CachedBackbone(Unmasked)


@leak(**ATTENTION)
def cache_with_unwritten_positions():
    """The cache has room for 64 positions, and its zeros take part in the softmax."""

    class Static(CachedAttention):
        def extended(self, x: Tensor, past: Layer | None) -> tuple[Tensor, Layer]:
            _, layer = super().extended(x, past)
            room = CONTEXT_LENGTH - layer[0].shape[2]
            k, v = (nn.functional.pad(part, (0, 0, 0, room)) for part in layer)
            visible = torch.ones(x.shape[1], CONTEXT_LENGTH, device=x.device)
            visible = visible.tril(layer[0].shape[2] - x.shape[1]).bool()
            visible[:, layer[0].shape[2] :] = True
            return self.merge(masked_softmax(self.scores(self.heads(x)[0], k), visible) @ v), layer

    return CachedBackbone(Static)


@leak(**CACHE)
def positions_start_again_in_each_chunk():
    """Each chunk has the positions of the first one."""

    class Restarting(CachedBackbone):
        def first_position(self, past_key_values: tuple[Layer, ...] | None) -> int:
            return 0

    return Restarting()


@leak(**CACHE)
def positions_one_too_small():
    """The position of a chunk is counted from the last cached token."""

    class OneLess(CachedBackbone):
        def first_position(self, past_key_values: tuple[Layer, ...] | None) -> int:
            return max(0, super().first_position(past_key_values) - 1)

    return OneLess()


@leak(**ATTENTION)
def cache_that_keeps_its_older_half():
    """Above 24 positions the cache drops the newest ones instead of the oldest."""

    class Older(CachedAttention):
        def store(self, k: Tensor, v: Tensor) -> Layer:
            return k[:, :, :24], v[:, :, :24]

    return CachedBackbone(Older)


@leak(**ATTENTION)
def cache_of_another_row():
    """The cached rows are reordered, as after a beam search."""

    class Reordered(CachedAttention):
        def store(self, k: Tensor, v: Tensor) -> Layer:
            return k.roll(1, 0), v.roll(1, 0)

    return CachedBackbone(Reordered)


class Windowed(CachedAttention):
    """A window of 8 keys."""

    def __init__(self):
        super().__init__(lambda query, key: (key <= query) & (key > query - 8))


@leak(**ATTENTION, expected=window(15))
def window_forgotten_with_a_cache():
    """Without a cache the window is 8; with one, each query sees all cached keys."""

    class Forgotten(Windowed):
        def visible_keys(self, query: Tensor, key: Tensor, n_cached: int) -> Tensor:
            return key <= query

    return CachedBackbone(Forgotten)


@leak(**ATTENTION)
def cache_scaled_by_its_largest_key():
    """The cache is rounded to 8 bits with one scale for all that it holds, so new keys change the old ones."""

    class Rounded(CachedAttention):
        def store(self, k: Tensor, v: Tensor) -> Layer:
            scale = k.abs().amax((1, 2, 3), keepdim=True) / 7
            return (k / scale).round() * scale, v

    return CachedBackbone(Rounded)


@leak(**CACHE)
def cache_shared_between_calls():
    """A call without a cache continues the cache of the call before it."""

    class Shared(CachedBackbone):
        last = None

        def forward(self, input_ids: Tensor, past_key_values=None, use_cache: bool = False) -> CachedOutput:
            fresh = use_cache and past_key_values is None
            if fresh and self.last is not None and len(self.last[0][0]) == len(input_ids):
                past_key_values = tuple((k[:, :, :1], v[:, :, :1]) for k, v in self.last)
            out = super().forward(input_ids, past_key_values, use_cache)
            self.last = out.past_key_values
            return out

    return Shared(context_length=CONTEXT_LENGTH + 1)


@correct(**RIGHT)
def cached_attention():
    """Chunks of any size give the logits of one pass."""
    return CachedBackbone()


@correct(**RIGHT, expected=window(15))
def cached_sliding_window():
    """A window of 8 in each layer, with all keys in the cache."""
    return CachedBackbone(Windowed)


@correct(**RIGHT)
def cache_of_fixed_size():
    """The cache has room for 64 positions, and the unwritten ones are masked."""

    class Static(CachedAttention):
        def extended(self, x: Tensor, past: Layer | None) -> tuple[Tensor, Layer]:
            _, layer = super().extended(x, past)
            n_keys = layer[0].shape[2]
            k, v = (nn.functional.pad(part, (0, 0, 0, CONTEXT_LENGTH - n_keys)) for part in layer)
            visible = torch.ones(x.shape[1], CONTEXT_LENGTH, device=x.device).tril(n_keys - x.shape[1]).bool()
            return self.merge(masked_softmax(self.scores(self.heads(x)[0], k), visible) @ v), layer

    return CachedBackbone(Static)


@correct(**RIGHT)
def cached_lstm():
    """The cache of an LSTM is its state."""

    class CachedLSTM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB_SIZE, DIM), nn.Linear(DIM, VOCAB_SIZE)
            self.lstm = nn.LSTM(DIM, DIM, batch_first=True)

        def forward(self, input_ids: Tensor, past_key_values=None, use_cache: bool = False) -> CachedOutput:
            x, state = self.lstm(self.embed(input_ids), past_key_values)
            return CachedOutput(self.head(x), state if use_cache else None)

    return CachedLSTM()
