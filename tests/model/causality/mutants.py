"""Mutants: mistakes that causal attention could have, each put into the real modules, and the checks that must catch it.

B batch, T queries, S keys, H query heads, G key/value heads, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tril.model import attention, backends, masks
from tril.model.gpt import GPT, GPTConfig

Patch = pytest.MonkeyPatch
TINY = {
    "vocab_size": 31,
    "context_length": 40,
    "n_layers": 2,
    "dim": 32,
    "n_heads": 4,
    "n_kv_heads": 2,
    "backend": "explicit",
}
NEXT = {"no future": "query 0 changes with key 1, first in layer 0", "attention": "layer 0, head 0, query 0, key 1:"}


@dataclass(frozen=True)
class Grid:
    """The certificate that a mutant is put before, with the config's own backend alone."""

    config: GPTConfig
    precision: str


@dataclass(frozen=True)
class Mutant:
    """`where`: for a check, a pattern that one of its failures must match; a failure reads "where (cell length=n)"."""

    checks: tuple[str, ...]
    put_in: Callable[[Patch], None]
    grid: Grid
    where: dict[str, str]


CATALOGUE: dict[str, Mutant] = {}


def mutant(*checks: str, where: dict[str, str] | None = None, precision: str = "32-true", **choices):
    """Enters a function into the catalogue; `choices` are those of its GPTConfig that differ from TINY."""

    def enter(put_in):
        grid = Grid(GPTConfig(**{**TINY, **choices}), precision)
        CATALOGUE[put_in.__name__] = Mutant(checks, put_in, grid, where or {})
        return put_in

    return enter


def rule(patch: Patch, visible: Callable[[Tensor, Tensor], Tensor]) -> None:
    """In the place of `key <= query` and of the window."""
    for module in (masks, backends):
        patch.setattr(module, "visible_from_positions", lambda query, key, window: visible(query, key))
    patch.setattr(
        backends, "_causal_block_mask", backends._causal_block_mask.__wrapped__
    )  # flex would remember another mutant's mask


def kernel(patch: Patch, changed: Callable, name: str = "explicit") -> None:
    """changed(original, q, k, v, mask, causal, window, dropout_p) in the place of a backend."""
    original = backends.BACKENDS[name]
    patch.setitem(backends.BACKENDS, name, lambda *arguments: changed(original, *arguments))


def causal_if(patch: Patch, condition: Callable[[Tensor, Tensor, float], bool]) -> None:
    """Without the mask, unless condition(q, k, dropout_p)."""

    def changed(original, q, k, v, mask, causal, window, dropout_p):
        return original(q, k, v, mask, causal and condition(q, k, dropout_p), window, dropout_p)

    kernel(patch, changed)


def softmax(patch: Patch, weights: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """weights(q k^T (B, H, T, S), visible, sqrt(D)) in the place of the masked softmax."""

    def changed(q, k, mask=None):
        products = q @ backends._per_query_head(k, q).mT  # (B, H, T, S)
        visible = torch.ones((), dtype=torch.bool) if mask is None else mask
        return weights(products, visible.expand_as(products), math.sqrt(q.shape[-1]))

    patch.setattr(backends, "attention_weights", changed)


def masked(scores: Tensor, visible: Tensor, value: float = -math.inf) -> Tensor:
    return scores.masked_fill(~visible, value)


# The mask


@mutant("no future", "attention", "decoding", "canary", where=NEXT)
def mask_off_by_one_shows_the_next(patch):
    rule(patch, lambda query, key: key <= query + 1)


@mutant("attention", "decoding", where={"attention": "layer 0, head 0, query 0, key 0:"})
def mask_off_by_one_hides_itself(patch):
    """The residual stream still carries each token to its own output: its reach has no hole."""
    rule(patch, lambda query, key: key < query)


@mutant("no future", "attention", where=NEXT, backend="flex", context_length=24)
def mask_off_by_one_in_flex(patch):
    rule(patch, lambda query, key: key <= query + 1)


@mutant("no future", "attention", "decoding", "documents", "canary", where=NEXT, backend="fused")
def no_mask(patch):
    kernel(patch, lambda original, q, k, v, mask, causal, *rest: original(q, k, v, mask, False, *rest), "fused")


@mutant(
    "no future", "all of the past", "attention", "decoding", where={"all of the past": "query 1 does not see key 0"}
)
def mask_transposed(patch):
    rule(patch, lambda query, key: key >= query)


@mutant("decoding", "attention", where={"decoding": "chunks of 1: row 0, position 1 "}, backend="fused")
def wrong_corner_under_a_cache(patch):
    """torch's is_causal counts queries and keys from the same corner."""

    def changed(original, q, k, v, mask, causal, window, dropout_p):
        if not causal or window is not None:
            return original(q, k, v, mask, causal, window, dropout_p)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout_p, enable_gqa=True)

    kernel(patch, changed, "fused")


@mutant("decoding", "attention", where={"decoding": "chunks of 7: row 0, position 7 "})
def no_mask_inside_a_chunk(patch):
    causal_if(patch, lambda q, k, dropout_p: q.shape[2] == k.shape[2])


@mutant(
    "no future",
    "attention",
    where={"no future": "key 0 behind the window", "attention": "head 0, query 10, key 0:"},
    window=10,
)
def window_one_too_wide(patch):
    rule(patch, lambda query, key: (key <= query) & (key >= query - 10))


@mutant("all of the past", "attention", where={"attention": "layer 0, head 0, query 9, key 0:"}, window=10)
def window_one_too_narrow(patch):
    rule(patch, lambda query, key: (key <= query) & (key > query - 9))


@mutant("attention", where={"attention": "layer 0, head 0, query 10, key 0: .*length=11"}, window=10)
def window_one_too_wide_where_it_begins_to_hide(patch):
    """Two layers may see as far as that: only a single layer's weights show it."""

    def changed(original, q, k, v, mask, causal, window, dropout_p):
        return original(q, k, v, mask, causal, None if window == k.shape[2] - 1 else window, dropout_p)

    kernel(patch, changed)


@mutant("decoding", "attention", window=10)
def window_forgotten_under_a_cache(patch):
    def changed(original, q, k, v, mask, causal, window, dropout_p):
        return original(q, k, v, mask, causal, window if q.shape[2] == k.shape[2] else None, dropout_p)

    kernel(patch, changed)


@mutant("decoding", "documents", window=10)
def window_forgotten_beside_a_mask(patch):
    original = attention.visible_keys
    patch.setattr(attention, "visible_keys", lambda *sizes, **options: original(*sizes, **{**options, "window": None}))


@mutant("decoding", "documents", where={"documents": "the document at 0: row 0, position 0 "})
def future_seen_beside_a_mask(patch):
    patch.setattr(attention, "visible_keys", lambda n_queries, n_keys, *, mask, **options: attention.as_boolean(mask))


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 15, key 16:"})
def leak_at_every_chunk_border(patch):
    rule(patch, lambda query, key: (key <= query) | ((key == query + 1) & (key % 16 == 0)))


@mutant(
    "no future",
    "attention",
    where={"no future": "query 31 changes with key 32, first in layer 0", "attention": "query 31, key 32:"},
)
def leak_at_one_border(patch):
    rule(patch, lambda query, key: (key <= query) | ((query == 31) & (key == 32)))


@mutant(
    "all of the past",
    "attention",
    where={"all of the past": "query 16 does not see key 0", "attention": "query 16, key 0:"},
)
def past_forgotten_at_chunk_borders(patch):
    rule(patch, lambda query, key: (key <= query) & (key // 16 == query // 16))


@mutant("no future", "attention", where={"attention": "layer 0, head 1, query 0, key 1:"})
def mask_on_the_first_head_alone(patch):
    def changed(original, q, k, v, mask, causal, *rest):
        k, v = backends._per_query_head(k, q), backends._per_query_head(v, q)  # (B, H, S, D)
        first = original(q[:, :1], k[:, :1], v[:, :1], mask, causal, *rest)
        return torch.cat((first, original(q[:, 1:], k[:, 1:], v[:, 1:], mask, False, *rest)), dim=1)  # (B, H, T, D)

    kernel(patch, changed)


@mutant(
    "no future", "attention", where={"no future": "first in layer 1", "attention": "layer 1, head 2, query 0, key 1:"}
)
def leak_in_one_head_of_one_layer(patch):
    def leaky(q, k, v, mask, causal, window, dropout_p):
        out = backends.explicit(q, k, v, mask, causal, window, dropout_p)
        unmasked = backends.explicit(q, k, v, mask, False, None, dropout_p)
        return torch.cat((out[:, :2], unmasked[:, 2:3], out[:, 3:]), dim=1)  # (B, H, T, D)

    original = GPT.__init__

    def init(self, config):
        original(self, config)
        self.blocks[1].attn.backend = "leaky"

    patch.setitem(backends.BACKENDS, "leaky", leaky)
    patch.setattr(GPT, "__init__", init)


@mutant("no future", "attention", where={"no future": "length=40", "attention": "length=40"})
def leak_at_the_full_context_alone(patch):
    causal_if(patch, lambda q, k, dropout_p: q.shape[2] != 40)


@mutant("canary")
def leak_at_multiples_of_32_alone(patch):
    """As a fast path could have it. Here the grid has no such length, but the canary has."""
    causal_if(patch, lambda q, k, dropout_p: q.shape[2] % 32 > 0)


@mutant("no future", "attention", where={"no future": "dropout=True", "attention": "dropout=True"})
def mask_dropped_with_dropout(patch):
    causal_if(patch, lambda q, k, dropout_p: dropout_p == 0)


# Scores and softmax


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 0, key 1: weight -1e"})
def mask_added_after_the_softmax(patch):
    softmax(
        patch, lambda products, visible, root: (products / root).softmax(-1) + masked(torch.zeros(()), visible, -1e9)
    )


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 0, key 0:"})
def mask_multiplied_after_the_softmax(patch):
    """No weight is forbidden, but the sum that they were divided by knows the future."""
    softmax(patch, lambda products, visible, root: (products / root).softmax(-1) * visible)


@mutant("no future", "attention", where={"attention": "layer 0, head 0, query 0, key 0:"})
def softmax_over_the_queries(patch):
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-2).nan_to_num())


@mutant("attention", where={"attention": "layer 0, head 0, query 1, key 0:"})
def missing_scale(patch):
    softmax(patch, lambda products, visible, root: masked(products, visible).softmax(-1))


@mutant("attention", where={"attention": "layer 0, head 0, query 1, key 0:"})
def floor_division_by_the_root(patch):
    softmax(
        patch, lambda products, visible, root: masked(products.div(root, rounding_mode="floor"), visible).softmax(-1)
    )


@mutant("attention", where={"attention": "layer 0, head 1, query 1, key 0:"})
def keys_of_the_wrong_group(patch):
    patch.setattr(backends, "_per_query_head", lambda x, q: x.repeat(1, q.shape[1] // x.shape[1], 1, 1))


@mutant("no future", "attention", where={"no future": "weights=sharp", "attention": "weights=sharp"})
def finite_mask_value(patch):
    softmax(patch, lambda products, visible, root: masked(products / root, visible, -1e4).softmax(-1))


@mutant("no future", "attention", where={"no future": "weights=sharp", "attention": "weights=sharp"})
def finite_mask_value_added(patch):
    softmax(
        patch, lambda products, visible, root: (products / root + masked(torch.zeros(()), visible, -1e4)).softmax(-1)
    )


@mutant(
    "no future",
    "all of the past",
    "attention",
    "decoding",
    "rows",
    "canary",
    where={"attention": "layer 0, head 0, query 0, key 0:"},
)
def nan_in_the_first_row(patch):
    """A NaN passes no check: it is neither 0 nor within a bound."""
    rule(patch, lambda query, key: key < query)
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-1))


@mutant("decoding", where={"decoding": "[1-9][0-9]* places of padding: row ., position 0 "})
def nan_where_padding_sees_nothing(patch):
    """It arrives through the values of the next layer: a weight of 0 times NaN is NaN."""
    softmax(patch, lambda products, visible, root: masked(products / root, visible).softmax(-1))

    def naive(q, k, v, *, mask, causal, window, dropout_p, backend):
        mask = attention.visible_keys(q.shape[2], k.shape[2], mask=mask, causal=causal, window=window, device=q.device)
        return backends.explicit(q, k, v, mask, False, None, dropout_p)

    patch.setattr(attention, "attention", naive)
