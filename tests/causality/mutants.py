"""Mutants of our own GPT: defects patched into the real modules, which the certificate must catch.

B batch, T queries, S keys, H query heads, G key/value heads, C width, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import NANO_PARTS
from tril.model import attention, backends, masks, positions
from tril.model.attention import BACKENDS
from tril.model.config import GPTConfig
from tril.model.gpt import MLP, Block
from tril.model.layers import RMSNorm
from tril.model.masks import Masking
from tril.model.offset_keys import OffsetKeys

Patch = tuple[Any, str, Callable[[Any], Any]]  # one owner or several, an attribute, original -> what replaces it
TINY = {"vocab_size": 31, "context_length": 40, "n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2} | NANO_PARTS
WINDOW, ALIBI, FUSED = {"window": 10}, {"pos": "alibi"}, {"backend": "fused"}
STACKED = ALIBI | {"backend": "stacked"}


@dataclass(frozen=True)
class Mutant:
    """Patches, and the config and the precision of the model that shows them."""

    name: str
    patches: tuple[Patch, ...]
    config: GPTConfig
    precision: str


def mutant(name: str, *patches: Patch, precision: str = "32-true", **choices: Any) -> Mutant:
    return Mutant(name, patches, GPTConfig(**TINY | {"backend": "explicit"} | choices), precision)


def rule(visible: Callable[[Tensor, Tensor], Tensor]) -> Patch:
    """Builds causal masks by another rule than the definition, without a window."""

    def causal_mask(n_queries, n_keys, *, window=None, start=None, device=None):
        query = torch.arange(n_queries)[:, None] + (n_keys - n_queries if start is None else start)
        return visible(query, torch.arange(n_keys))  # (T, S)

    return (masks, attention, backends), "causal_mask", lambda original: causal_mask


def kernel(changed: Callable[..., Any], name: str = "explicit") -> Patch:
    """Replaces a backend by changed(original, q, k, v, masking, dropout_p), which returns what a backend does."""
    return BACKENDS, name, lambda original: lambda *inputs: changed(original, *inputs)


def masking(name: str = "explicit", **changes: Callable[..., Any]) -> Patch:
    """Replaces fields of the masking by functions of queries, keys (B, G, S, D), masking and dropout."""

    def changed(run, q, k, v, m, p):
        return run(q, k, v, m._replace(**{key: change(q, k, m, p) for key, change in changes.items()}), p)

    return kernel(changed, name)


def causal_if(condition: Callable[[int, int, float], bool]) -> Patch:
    """Drops the causal mask unless condition(T, S, dropout)."""
    return masking(causal=lambda q, k, m, p: m.causal and condition(q.shape[2], k.shape[2], p))


def softmax(weights: Callable[[Tensor, Tensor], Tensor]) -> Patch:
    """Replaces the masked softmax by weights(scores (B, H, T, S), visible)."""

    def changed(original: Callable, q: Tensor, k: Tensor, v: Tensor, m: Masking, p: float) -> tuple[Tensor, Tensor]:
        k, v = attention.repeat_heads(k, q), attention.repeat_heads(v, q)  # (B, H, S, D)
        scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
        mask = masks.causal_mask(q.shape[2], k.shape[2], window=m.window) if m.causal else m.mask
        visible = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand_as(scores)
        new = F.dropout(weights(scores, visible), p).to(v.dtype)
        return new @ v, new

    return kernel(changed)


def arguments(owner: Any, name: str, **changes: Callable[..., Any]) -> Patch:
    """Replaces keyword arguments of a function by functions of them all."""

    def patched(original):
        return lambda *given, **named: original(*given, **named | {key: f(**named) for key, f in changes.items()})

    return owner, name, patched


def layer(kind: type, changed: Callable[..., Tensor]) -> Patch:
    """Passes the output and the input of every layer of this type through `changed`."""
    return kind, "forward", lambda run: lambda self, x, *rest, **named: changed(run(self, x, *rest, **named), x)


def next_token(x: Tensor) -> Tensor:  # (B, T, C), zeros at the last position
    return F.pad(x[:, 1:], (0, 0, 0, 1))


def block_means(x: Tensor, size: int) -> Tensor:  # (B, T, C)
    return torch.cat([block.mean(1, True).expand_as(block) for block in x.split(size, 1)], 1)


def scaled_by_last_key(dtype: torch.dtype) -> Patch:
    def changed(run, q, k, *rest):
        out, weights = run(q, k, *rest)  # (B, H, T, D)
        return out * (1 + (q.dtype == dtype) * 0.5 * k[:, :1, -1:, :1].detach().tanh()), weights

    return kernel(changed, "fused")


def corner(run, q, k, v, m, p):
    """torch's is_causal aligns the first query with the first key."""
    if not m.causal or m.window is not None:
        return run(q, k, v, m, p)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True), None


def one_head(run, q, k, v, m, p):
    """Without a mask in the third head."""
    out, seen = run(q, k, v, m, p)[0], run(q, k, v, m._replace(causal=False), p)[0]  # (B, H, T, D)
    return torch.cat((out[:, :2], seen[:, 2:3], out[:, 3:]), dim=1), None


def naive_attention(original):
    def changed(q, k, v, *, mask, bias, causal, window, dropout_p, **_):
        options = {"mask": mask, "bias": bias, "causal": causal, "window": window, "device": q.device}
        mask = attention.visible_keys(q.shape[2], k.shape[2], **options)
        return BACKENDS["explicit"](q, k, v, Masking(mask, bias, False, None), dropout_p)[0]

    return changed


def compiled(original):
    return lambda model, **_: lambda ids, **rest: (y := model(ids, **rest)) + 0.1 * next_token(y)


def seen_with_a_mask(original):
    return lambda *_, mask, **rest: None if mask is None else attention.as_boolean(mask)


def bias_without_mask(mask, bias, **_):
    return bias if mask is None else None


def leak_with_gradients(y, x):
    return y + 0.1 * next_token(y.detach()) * torch.is_grad_enabled()


def before_the_first_hidden_key(q, k, m, p):
    """Two layers may see as far as one key more; only the weights of a single layer show it."""
    return None if m.window == k.shape[2] - 1 else m.window


# NaN passes no check, and spreads through the values of the next layer: a weight of 0 times NaN is NaN
NAN = softmax(lambda s, v: s.masked_fill(~v, -math.inf).softmax(-1))
FIRST = torch.tensor([0])
WITHOUT_A_CACHE = {"window": lambda q, k, m, p: m.window if q.shape[2] == k.shape[2] else None}
MUTANTS = [
    # Where a token is hidden from itself, the residual stream still carries it to its own output
    mutant("mask_off_by_one_shows_the_next", rule(lambda q, k: k <= q + 1)),
    mutant("mask_off_by_one_hides_itself", rule(lambda q, k: k < q)),
    mutant("no_mask", masking("fused", causal=lambda *_: False), **FUSED),
    mutant("wrong_corner_under_a_cache", kernel(corner, "fused"), **FUSED),
    mutant("no_mask_inside_a_chunk", causal_if(lambda t, s, p: t == s)),
    mutant("window_one_too_wide", rule(lambda q, k: (k <= q) & (k >= q - 10)), **WINDOW),
    mutant("window_one_too_narrow", rule(lambda q, k: (k <= q) & (k > q - 9)), **WINDOW),
    mutant("window_too_wide_at_the_first_hidden_key", masking(window=before_the_first_hidden_key), **WINDOW),
    mutant("window_forgotten_under_a_cache", masking(**WITHOUT_A_CACHE), **WINDOW),
    mutant("window_forgotten_with_a_mask", arguments(attention, "visible_keys", window=lambda **_: None), **WINDOW),
    mutant("future_seen_with_a_mask", (attention, "visible_keys", seen_with_a_mask)),
    mutant("leak_at_one_boundary", rule(lambda q, k: (k <= q) | ((q == 31) & (k == 32)))),
    mutant("past_forgotten_at_chunk_boundaries", rule(lambda q, k: (k <= q) & (k // 16 == q // 16))),
    mutant("leak_in_one_head", kernel(one_head)),
    mutant("leak_at_the_full_context_only", causal_if(lambda t, s, p: t != 40)),
    mutant("leak_at_multiples_of_32_only", causal_if(lambda t, s, p: t % 32 > 0)),
    mutant("mask_dropped_with_dropout", causal_if(lambda t, s, p: p == 0)),
    mutant("keys_of_the_next_position", (OffsetKeys, "shift", lambda _: lambda self, k, cache=None: k.roll(-1, 2))),
    mutant("half_a_key_of_another_document", (OffsetKeys, "separate", lambda _: lambda self, k, *_, **__: k)),
    mutant(
        "offset_of_the_keys_within_a_chunk", (OffsetKeys, "shift", lambda run: lambda self, k, cache=None: run(self, k))
    ),
    mutant("mask_multiplied_after_the_softmax", softmax(lambda s, v: s.softmax(-1) * v)),
    mutant("softmax_over_the_queries", softmax(lambda s, v: s.masked_fill(~v, -math.inf).softmax(-2).nan_to_num())),
    mutant("finite_mask_value", softmax(lambda s, v: s.masked_fill(~v, -1e4).softmax(-1))),
    mutant("nan_in_the_first_row", rule(lambda q, k: k < q), NAN),
    mutant("nan_in_fully_masked_rows_of_padding", NAN, (attention, "attention", naive_attention)),
    mutant("alibi_counted_from_the_chunk", arguments(positions, "alibi_bias", start=lambda **_: FIRST), **ALIBI),
    mutant("bias_dropped_with_a_mask", arguments(attention, "attention", bias=bias_without_mask), **ALIBI),
    mutant("mask_dropped_with_a_bias", (backends, "additive", lambda _: lambda bias, mask: bias), **FUSED, **ALIBI),
    mutant(
        "bias_of_the_first_head",
        masking("stacked", bias=lambda *x: x[2].bias[..., :1, :, :]),
        backend="stacked",
        **ALIBI,
    ),
    mutant("block_means_of_16", layer(Block, lambda y, x: y + block_means(y, 16))),
    mutant("norm_over_the_sequence", layer(RMSNorm, lambda y, x: y / (1 + y.square().mean(-2, keepdim=True)))),
    mutant("leak_below_rounding", layer(Block, lambda y, x: y + 1e-9 * next_token(y)), **FUSED),
    mutant("leak_after_a_projection_of_zeros", layer(MLP, lambda y, x: y * (1 + next_token(x))), init="zero_out"),
    mutant("leak_of_the_float32_kernel_only", scaled_by_last_key(torch.float32), **FUSED),
    mutant("leak_of_the_bf16_kernel_only", scaled_by_last_key(torch.bfloat16), precision="bf16-mixed", **FUSED),
    mutant("detached_leak_where_gradients_are_on", layer(Block, leak_with_gradients)),
    mutant("leak_of_the_compiled_model_only", (torch, "compile", compiled)),
]
