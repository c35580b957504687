"""`GPTConfig`: what is refused, derived sizes, and its count of parameters compared with that of the model."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tril.data.settings import declared, explain
from tril.model.config import GPTConfig, check_memory
from tril.model.gpt import GPT

CHOICES = {setting.key: list(setting.choices) for setting in declared(GPTConfig) if setting.choices}
CHOICES |= {
    "tie_embeddings": [True, False],
    "bias": [True, False],
    "qkv_bias": [None, True, False],
    "n_heads": [0, 2, 6],
    "n_kv_heads": [None, 1, 2],
    "head_dim": [None, 4],
    "mlp_hidden": [None, 7],
    "dim": [12, 36],
    "n_layers": [1, 2],
}


def refusal(*args, **choices) -> str:
    """The one line that the user gets."""
    with pytest.raises(ValidationError) as error:
        GPTConfig(*args, **choices)
    assert isinstance(error.value, ValueError)  # what users of the library catch
    return explain(error.value)


def test_each_field_refuses_another_type_by_its_name():
    for field in dataclasses.fields(GPTConfig):
        for wrong in ([1], "192 ", 1.5j):
            assert f"model.{field.name}=" in refusal(**{"vocab_size": 50, field.name: wrong})


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"n_head": 4}, "model.n_head is unknown"),
        ({"mlp_ratio": float("nan")}, "model.mlp_ratio=nan must be less than 2147483648"),
        ({"norm": "batch", "n_layers": 0, "n_heads": 5}, "model.n_layers=0 must be greater than or equal to 1; "
         "model.norm=batch must be 'rmsnorm' or 'layernorm'"),
        ({"n_heads": 3, "dim": 128}, "model.n_heads=3 must divide model.dim=128; use 1, 2, 4, another dim, or set "
         "model.head_dim"),
        ({"window": 8, "causal": False}, "model.window=8 needs model.causal=true"),
        ({"backend": "flex", "attn_dropout": 0.1}, "model.backend=flex has no attention dropout "
         "(model.attn_dropout=0.1); use model.backend=fused"),
        ({"mlp_ratio": 1e-9}, "model.mlp_ratio=1e-09 leaves the FFN without hidden units at model.dim=192; raise it"),
    ],
)  # fmt: skip
def test_wrong_values_and_combinations_are_refused(choices, message):
    assert refusal(50, **choices) == message


@pytest.mark.parametrize(
    "choices, sizes",
    [
        ({"dim": 128, "n_heads": 2, "n_kv_heads": 1, "mlp": "swiglu"}, (64, 1, 341)),  # 2/3 of 512
        ({"dim": 128, "mlp": "swiglu", "mlp_hidden": 100, "mlp_ratio": 1e-9}, (32, 4, 100)),
        ({"dim": 33, "n_heads": 0}, (0, 0, 132)),  # without heads nothing has to divide the width, or be even
        ({"dim": 36, "pos": "alibi", "mlp": "none", "mlp_hidden": 100}, (9, 4, 0)),
    ],
)
def test_derived_sizes(choices, sizes):
    config = GPTConfig(50, **choices)
    assert (config.head_size, config.kv_heads, config.mlp_size) == sizes


@settings(deadline=None, max_examples=150, derandomize=True)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()}))
def test_parameters_are_counted_as_the_model_has_them(choices):
    try:
        config = GPTConfig(11, context_length=5, **choices)
    except ValueError:
        return
    with torch.device("meta"):
        assert config.n_parameters() == GPT(config).n_parameters()


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"dim": 10**7, "n_heads": 1}, r"model.dim=10000000, .* GiB of memory, and this machine has"),
        ({"vocab_size": 2**40}, r"model.vocab_size=1099511627776 .* GiB of memory, and this machine has"),
        ({"context_length": 2**40}, "model.context_length=1099511627776 must be at most 5592405, for its tables"),
    ],
)
def test_what_exceeds_the_memory_is_refused_before_it_is_allocated(choices, message):
    with pytest.raises(ValueError, match=message) as error:
        check_memory(GPTConfig(**{"vocab_size": 50} | choices))
    assert "\n" not in str(error.value)
    check_memory(GPTConfig(50))


def test_settings_are_checked_without_torch():
    code = "import sys; from tril.model.config import GPTConfig; GPTConfig(50); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
