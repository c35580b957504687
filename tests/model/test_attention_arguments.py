"""Arguments that `attention` and `MultiHeadAttention` refuse, each in one line.

B batch, T queries, S keys, H query heads, G key/value heads, D head size, C width.
"""

import pytest
import torch

from tests.conftest import BACKENDS
from tril.model.attention import MultiHeadAttention, attention
from tril.model.kv_cache import KVCache
from tril.model.rope import rope_table

B, T, S, C, H = 2, 6, 9, 24, 4


def make_qkv(n_queries, n_keys, n_kv_heads=2):
    q = torch.randn(B, H, n_queries, 8)
    k, v = torch.randn(2, B, n_kv_heads, n_keys, 8)
    return q, k, v


def test_flex_refuses_dropout_and_gradients():
    q, k, v = make_qkv(4, 4)
    with pytest.raises(ValueError, match="flex.*no attention dropout.*0.1"):
        attention(q, k, v, dropout_p=0.1, backend="flex")
    with pytest.raises(ValueError, match="flex.*cannot train on cpu.*use backend='fused'"):
        attention(q, k.clone().requires_grad_(), v, backend="flex")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"window": 3}, "window=3 .*needs causal=True"),
        ({"window": 0, "causal": True}, "window=0 must be at least 1"),
        ({"mask": torch.ones(6, 6)}, r"mask must be boolean.*torch.float32.*mask.bool\(\)"),
        ({"mask": torch.ones(6, 6, dtype=torch.complex64)}, "mask must be boolean.*torch.complex64"),
        ({"mask": torch.ones(6, 5, dtype=torch.bool)}, r"\(6, 5\) does not broadcast to .* \(2, 4, 6, 6\)"),
        ({"bias": torch.ones(6, 6, dtype=torch.bool)}, "bias must be floating point, not torch.bool; .* given as mask"),
        ({"bias": torch.ones(6, 6, dtype=torch.int64)}, "bias must be floating point, not torch.int64"),
        ({"bias": torch.ones(6, 6, dtype=torch.complex64)}, "bias must be floating point, not torch.complex64"),
        ({"bias": torch.ones(6, 5)}, r"bias of shape \(6, 5\) does not broadcast to \(B, H, T, S\) = \(2, 4, 6, 6\)"),
        ({"bias": torch.ones(2, 6)}, r"bias of shape \(2, 6\) does not broadcast"),
        ({"bias": torch.ones(1, 2, 4, 6, 6)}, r"bias of shape \(1, 2, 4, 6, 6\) does not broadcast"),
        ({"mask": torch.zeros(6, 6), "bias": torch.zeros(6, 6)}, "mask must be boolean.*torch.float32"),
        ({"dropout_p": 1.0}, "dropout_p=1.0 must be at least 0 and below 1"),
        ({"dropout_p": -0.1}, "dropout_p=-0.1"),
        ({"dropout_p": float("nan")}, "dropout_p=nan"),
    ],
)
def test_wrong_arguments_are_refused_on_every_backend(backend, wrong, message):
    with pytest.raises(ValueError, match=message):
        attention(*make_qkv(6, 6), backend=backend, **wrong)


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 5, 8)),  # k and v of different lengths
        ((2, 4, 6, 8), (2, 4, 6, 9), (2, 4, 6, 9)),  # head sizes
        ((2, 4, 6, 8), (1, 4, 6, 8), (1, 4, 6, 8)),  # batches
        ((2, 4, 6, 8), (2, 3, 6, 8), (2, 3, 6, 8)),  # 4 query heads, 3 key heads
        ((2, 4, 6, 8), (2, 8, 6, 8), (2, 8, 6, 8)),
        ((2, 4, 6, 8), (2, 0, 6, 8), (2, 0, 6, 8)),
        ((2, 4, 6, 8), (2, 4, 6, 8), (1, 4, 6, 8)),
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 2, 6, 8)),  # value heads
        ((2, 4, 6, 8), (2, 6, 8), (2, 6, 8)),  # different numbers of dimensions
        ((2, 6, 8), (2, 6, 8), (6, 8)),
        ((6, 8), (1, 6, 8), (1, 6, 8)),
        ((4, 6, 8), (2, 6, 8), (2, 6, 8)),  # without heads no groups
        ((2, 6, 8), (1, 6, 8), (1, 6, 8)),
        ((2, 6, 8), (2, 6, 9), (2, 6, 9)),
        ((6, 8), (6, 8), (5, 8)),
        ((6, 8), (6, 9), (6, 8)),
        ((8,), (8,), (8,)),
        ((), (), ()),
        ((1, 2, 4, 6, 8), (1, 2, 4, 6, 8), (1, 2, 4, 6, 8)),
    ],
)
def test_wrong_shapes_are_refused_in_one_line(q, k, v):
    with pytest.raises(ValueError) as error:
        attention(torch.randn(q), torch.randn(k), torch.randn(v))
    assert all(str(shape) in str(error.value) for shape in (q, k, v)) and "\n" not in str(error.value)


def test_an_unknown_backend_is_refused_with_the_valid_names():
    with pytest.raises(ValueError, match="backend='flash' must be one of stacked, explicit, fused, flex"):
        attention(*make_qkv(6, 6), backend="flash")


@pytest.mark.parametrize(
    "choices, arguments, message",
    [
        ({}, {"key": torch.randn(B, S, C), "rope": rope_table(T, C // H)}, "cross-attention .* neither rope nor cache"),
        (
            {},
            {"key": torch.randn(B, S, C), "cache": KVCache(1, B, H, S, C // H).layer(0)},
            "cross-attention .* neither rope nor cache",
        ),
        ({"causal": False}, {"cache": KVCache(1, B, H, S, C // H).layer(0)}, "cache needs causal=True"),
        ({}, {"mask": torch.ones(T, T)}, "mask must be boolean"),
        ({}, {"mask": torch.ones(T, T + 1, dtype=torch.bool)}, "does not broadcast"),
    ],
)
def test_invalid_combinations_of_arguments_are_refused(choices, arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(C, H, **choices)(torch.randn(B, T, C), **arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"n_heads": 0}, "n_heads=0 must be at least 1"),
        ({"n_heads": -2}, "n_heads=-2 must be at least 1"),
        ({"n_heads": 4, "n_kv_heads": 0}, "n_kv_heads=0 must be at least 1"),
        ({"n_heads": 5}, "n_heads=5 must divide dim=24; .*head_dim"),
        ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads=3 must divide n_heads=4"),
        ({"n_heads": 4, "backend": "flash"}, "backend='flash' must be one of stacked, explicit, fused, flex"),
        ({"n_heads": 4, "window": 3, "causal": False}, "window=3 .*needs causal=True"),
        ({"n_heads": 4, "window": 0}, "window=0 must be at least 1"),
        ({"n_heads": 4, "v_head_dim": 0}, "v_head_dim=0 must be at least 1"),
        ({"n_heads": 4, "kv_dim": 0}, "kv_dim=0 must be at least 1"),
        ({"n_heads": 4, "out_dim": -1}, "out_dim=-1 must be at least 1"),
        ({"n_heads": 4, "out_proj": False, "out_bias": True}, "out_proj=False leaves out the projection"),
        ({"n_heads": 4, "out_proj": False, "out_dim": 24}, "out_proj=False leaves out the projection"),
        ({"n_heads": 4, "qk_norm": "batchnorm"}, "'batchnorm' must be one of rmsnorm, layernorm, none"),
        ({"n_heads": 4, "qk_norm": None}, "None must be one of rmsnorm, layernorm, none"),
        ({"n_heads": 4, "qk_norm": 1}, "1 must be one of rmsnorm, layernorm, none"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        MultiHeadAttention(24, **arguments)
    assert "\n" not in str(error.value)


def test_flex_refuses_training_on_a_cpu():
    with pytest.raises(ValueError, match="flex.*cannot train on cpu"):
        MultiHeadAttention(C, H, backend="flex")(torch.randn(B, T, C))
    with pytest.raises(ValueError, match="flex.*no attention dropout"), torch.no_grad():
        MultiHeadAttention(C, H, backend="flex", attn_dropout=0.1)(torch.randn(B, T, C))
