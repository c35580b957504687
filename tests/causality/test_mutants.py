"""Mutants of our own GPT, defects in its real modules: the certificate catches each, and passes the unmodified model.

The table in rows.py has the leaks that any model can have; these are of our backends, caches, windows and offset keys.

B batch, T queries, S keys, H query heads, G key/value heads, C width, D head size.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.conftest import NANO_PARTS
from tril.model import attention, backends, masks, positions
from tril.model.attention import BACKENDS
from tril.model.causality.certificate import Certificate, certify_model
from tril.model.causality.gpt import gpt_variants, subject_of
from tril.model.causality.model import ModelError
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.offset_keys import OffsetKeys

Patch = tuple[Any, str, Callable[[Any], Any]]  # one owner or several, an attribute, original -> what replaces it
TINY = {"vocab_size": 31, "context_length": 24, "n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 2} | NANO_PARTS
WINDOW, ALIBI, FUSED = {"window": 10}, {"pos": "alibi"}, {"backend": "fused"}


def mutant(name: str, *patches: Patch, **choices: Any) -> Any:
    return pytest.param(patches, GPTConfig(**TINY | {"backend": "explicit"} | choices), id=name)


def rule(visible: Callable[[Tensor, Tensor], Tensor]) -> Patch:
    """Builds causal masks by another rule than the definition, without a window."""

    def causal_mask(n_queries, n_keys, *, window=None, start=None, device=None):
        query = torch.arange(n_queries)[:, None] + (n_keys - n_queries if start is None else start)
        return visible(query, torch.arange(n_keys))  # (T, S)

    return (masks, attention), "causal_mask", lambda original: causal_mask


def kernel(changed: Callable[..., Any], name: str = "explicit") -> Patch:
    """Replaces a backend by changed(original, q, k, v, mask, bias, is_causal, dropout_p)."""
    return BACKENDS, name, lambda original: lambda *inputs: changed(original, *inputs)


def causal(changed: Callable[..., Tensor]) -> Patch:
    """Replaces the causal mask by changed(original, T, S, window)."""

    def patched(original):
        return lambda t, s, *, window=None, **rest: changed(functools.partial(original, **rest), t, s, window=window)

    return (masks, attention), "causal_mask", patched


def arguments(owner: Any, name: str, **changes: Callable[..., Any]) -> Patch:
    """Replaces keyword arguments of a function by functions of them all."""

    def patched(original):
        return lambda *given, **named: original(*given, **named | {key: f(**named) for key, f in changes.items()})

    return owner, name, patched


def nan_rows(run, q, k, v, mask, bias, is_causal, p):
    """The softmax of a row without a visible key is 0 / 0."""
    k, v = attention.repeat_heads(k, q), attention.repeat_heads(v, q)  # (B, H, S, D)
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, H, T, S)
    weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)
    return weights @ v, weights


def naive_attention(original):
    def changed(q, k, v, *, mask, bias, causal, window, dropout_p, **_):
        options = {"mask": mask, "bias": bias, "causal": causal, "window": window, "device": q.device}
        mask = attention.visible_keys(q.shape[2], k.shape[2], **options)
        return BACKENDS["explicit"](q, k, v, mask, bias, False, dropout_p)[0]

    return changed


def scaled_in_bf16(run, q, k, *rest):
    out, weights = run(q, k, *rest)  # (B, H, T, D)
    return out * (1 + (q.dtype == torch.bfloat16) * 0.5 * k[:, :1, -1:, :1].detach().tanh()), weights


def bias_of_the_first_head(run, q, k, v, mask, bias, *rest):
    return run(q, k, v, mask, bias[..., :1, :, :], *rest)


def compiled(original):
    return lambda model, **_: lambda ids, **rest: (y := model(ids, **rest)) + 0.1 * F.pad(y[:, 1:], (0, 0, 0, 1))


def seen_with_a_mask(original):
    return lambda *sizes, mask, **rest: original(*sizes, mask=mask, **rest) if mask is None else mask


def bias_without_mask(mask, bias, **_):
    return bias if mask is None else None


def window_forgotten_with_a_mask(mask, window, **_):
    return window if mask is None else None


def before_the_first_hidden_key(run, t, s, window):
    """Two layers may see as far as one key more; only the weights of a single layer show it."""
    return run(t, s, window=None if window == s - 1 else window)


FIRST = torch.tensor([0])
MUTANTS = [
    # Where a token is hidden from itself, the residual stream still carries it to its own output
    mutant("mask_off_by_one_shows_the_next", rule(lambda q, k: k <= q + 1)),
    mutant("mask_off_by_one_hides_itself", rule(lambda q, k: k < q)),
    mutant(
        "no_mask", kernel(lambda run, q, k, v, mask, bias, _, p: run(q, k, v, mask, bias, False, p), "fused"), **FUSED
    ),
    mutant("wrong_corner_under_a_cache", causal(lambda run, t, s, window: torch.ones(t, s).tril() > 0), **FUSED),
    mutant("no_mask_inside_a_chunk", causal(lambda run, t, s, window: run(t, s) | (t < s))),
    mutant("window_one_too_wide", rule(lambda q, k: (k <= q) & (k >= q - 10)), **WINDOW),
    mutant("window_one_too_narrow", rule(lambda q, k: (k <= q) & (k > q - 9)), **WINDOW),
    mutant("window_too_wide_at_the_first_hidden_key", causal(before_the_first_hidden_key), **WINDOW),
    mutant(
        "window_forgotten_under_a_cache",
        causal(lambda run, t, s, window: run(t, s, window=window if t == s else None)),
        **WINDOW,
    ),
    mutant(
        "window_forgotten_with_a_mask",
        arguments(attention, "visible_keys", window=window_forgotten_with_a_mask),
        **WINDOW,
    ),
    mutant("future_seen_with_a_mask", (attention, "visible_keys", seen_with_a_mask)),
    mutant("past_forgotten_at_chunk_boundaries", rule(lambda q, k: (k <= q) & (k // 16 == q // 16))),
    mutant("keys_of_the_next_position", (OffsetKeys, "shift", lambda _: lambda self, k, cache=None: k.roll(-1, 2))),
    mutant("half_a_key_of_another_document", (OffsetKeys, "separate", lambda _: lambda self, k, *_, **__: k)),
    mutant("offset_within_a_chunk", (OffsetKeys, "shift", lambda run: lambda self, k, cache=None: run(self, k))),
    mutant("nan_in_fully_masked_rows", kernel(nan_rows), (attention, "attention", naive_attention)),
    mutant("alibi_counted_from_the_chunk", arguments(positions, "alibi_bias", start=lambda **_: FIRST), **ALIBI),
    mutant("bias_dropped_with_a_mask", arguments(attention, "attention", bias=bias_without_mask), **ALIBI),
    mutant("mask_dropped_with_a_bias", (backends, "additive", lambda _: lambda bias, mask: bias), **FUSED, **ALIBI),
    mutant("bias_of_the_first_head", kernel(bias_of_the_first_head, "stacked"), backend="stacked", **ALIBI),
    mutant("leak_of_the_bf16_kernel_only", kernel(scaled_in_bf16, "fused"), **FUSED),
    mutant("leak_of_the_compiled_model_only", (torch, "compile", compiled)),
]
CONFIGS = {each.values[1]: each.id for each in reversed(MUTANTS)}  # named by the first of its mutants


@pytest.fixture(autouse=True)
def no_compilation(monkeypatch):
    """Compilation would take longer than all the rest. Mutants of the compiled model replace `torch.compile` too."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def certify(config: GPTConfig, seconds: float) -> Certificate:
    torch.manual_seed(0)
    model = subject_of(GPT(config).eval())
    return certify_model(model, gpt_variants(config, backends=[config.backend], compile=True), seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("patches", "config"), MUTANTS)
def test_a_mutant_is_caught(patches, config, monkeypatch):
    for owners, name, change in patches:
        for owner in owners if isinstance(owners, tuple) else (owners,):
            if isinstance(owner, dict):
                monkeypatch.setitem(owner, name, change(owner[name]))
            else:
                monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    try:
        certificate = certify(config, 1.0)
    except ModelError:  # such as for logits that are nan
        return
    assert not certificate.passed, certificate


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(each, id=name) for each, name in CONFIGS.items()])
def test_the_unmodified_model_passes(config):
    certificate = certify(config, 0.2)
    assert certificate.passed and not certificate.undecided, certificate
