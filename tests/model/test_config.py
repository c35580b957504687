"""`GPTConfig`: each refused value, combinations, derived sizes, and the same values as in configs/model/nano.yaml."""

import dataclasses

import pytest
import yaml
from pydantic import ValidationError

from tril.data.settings import explain
from tril.model.config import GPTConfig
from tril.scripts.common.cli import CONFIGS


def refusal(*args, **choices) -> str:
    """The one line that the user gets."""
    with pytest.raises(ValidationError) as error:
        GPTConfig(*args, **choices)
    assert isinstance(error.value, ValueError)  # what users of the library catch
    return explain(error.value)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("vocab_size", 0, "model.vocab_size=0 must be greater than or equal to 1"),
        ("context_length", 0, "model.context_length=0 must be greater than or equal to 1"),
        ("n_layers", -1, "model.n_layers=-1 must be greater than or equal to 1"),
        ("dim", 0, "model.dim=0 must be greater than or equal to 1"),
        ("n_heads", -1, "model.n_heads=-1 must be greater than or equal to 0"),
        ("n_kv_heads", 0, "model.n_kv_heads=0 must be greater than or equal to 1"),
        ("head_dim", 0, "model.head_dim=0 must be greater than or equal to 1"),
        ("window", 0, "model.window=0 must be greater than or equal to 1"),
        ("mlp", "silu", "model.mlp=silu must be 'relu', 'gelu', 'gelu_erf', 'relu2', 'swiglu' or 'none'"),
        ("norm", "batch", "model.norm=batch must be 'rmsnorm' or 'layernorm'"),
        ("pos", "sinusoidal", "model.pos=sinusoidal must be 'rope', 'learned', 'alibi' or 'none'"),
        ("init", "xavier", "model.init=xavier must be 'zero_out' or 'gpt2'"),
        ("backend", "flash", "model.backend=flash must be 'stacked', 'explicit', 'fused' or 'flex'"),
        ("mlp_ratio", 0.0, "model.mlp_ratio=0.0 must be greater than 0"),
        ("mlp_ratio", float("nan"), "model.mlp_ratio=nan must be less than 2147483648"),
        ("mlp_ratio", float("inf"), "model.mlp_ratio=inf must be less than 2147483648"),
        ("mlp_ratio", 1e-9, "model.mlp_ratio=1e-09 leaves the FFN without hidden units at model.dim=192; raise it"),
        ("logit_softcap", -1.0, "model.logit_softcap=-1.0 must be greater than 0"),
        ("logit_softcap", float("inf"), "model.logit_softcap=inf must be a finite number"),
        ("embd_dropout", 1.0, "model.embd_dropout=1.0 must be less than 1"),
        ("attn_dropout", -0.1, "model.attn_dropout=-0.1 must be greater than or equal to 0"),
        ("resid_dropout", float("nan"), "model.resid_dropout=nan must be less than 1"),
        ("n_kv_heads", 3, "model.n_kv_heads=3 must divide model.n_heads=4"),
        ("n_kv_heads", 8, "model.n_kv_heads=8 must divide model.n_heads=4"),
        ("head_dim", 7, "the head size 7 (model.head_dim, or dim / n_heads) must be even for model.pos=rope"),
        ("dim", "192", "model.dim='192' must be a valid integer"),
        ("dim", 192.0, "model.dim=192.0 must be a valid integer"),
        ("dim", True, "model.dim=true must be a valid integer"),
        ("window", 2.5, "model.window=2.5 must be a valid integer"),
        ("bias", 1, "model.bias=1 must be a valid boolean"),
        ("mlp", None, "model.mlp=null must be 'relu', 'gelu', 'gelu_erf', 'relu2', 'swiglu' or 'none'"),
        ("mlp_ratio", "4", "model.mlp_ratio='4' must be a valid number"),
        ("mlp_ratio", True, "model.mlp_ratio=true must be a valid number"),
        ("logit_softcap", "none", "model.logit_softcap='none' must be a valid number"),
        ("n_head", 4, "model.n_head is unknown"),
        ("qk_norm", "foo", "model.qk_norm=foo must be 'rmsnorm', 'layernorm' or 'none'"),
        ("qk_norm", None, "model.qk_norm=null must be 'rmsnorm', 'layernorm' or 'none'"),
        ("qkv_bias", "yes", "model.qkv_bias='yes' must be a valid boolean"),
        ("mlp_hidden", 0, "model.mlp_hidden=0 must be greater than or equal to 1"),
        ("mlp_hidden", 512.0, "model.mlp_hidden=512.0 must be a valid integer"),
        ("norm_eps", 0.0, "model.norm_eps=0.0 must be greater than 0"),
        ("rope_base", -1.0, "model.rope_base=-1.0 must be greater than 0"),
        ("rope_base", None, "model.rope_base=null must be a valid number"),
    ],
)
def test_each_wrong_value_is_refused_with_its_name_and_limit(field, value, message):
    assert refusal(**{"vocab_size": 50, field: value}) == message


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"window": 8, "causal": False}, "model.window=8 needs model.causal=true"),
        (
            {"backend": "flex", "attn_dropout": 0.1},
            "model.backend=flex has no attention dropout (model.attn_dropout=0.1); use model.backend=fused",
        ),
        (
            {"dim": 36, "n_heads": 4},
            "the head size 9 (model.head_dim, or dim / n_heads) must be even for model.pos=rope",
        ),
    ],
)
def test_invalid_combinations_are_refused(choices, message):
    assert refusal(50, **choices) == message


def test_heads_that_do_not_divide_the_width_are_refused_with_a_remedy():
    assert refusal(50, n_heads=3, dim=128) == (
        "model.n_heads=3 must divide model.dim=128; use 1, 2, 4, another dim, or set model.head_dim"
    )
    GPTConfig(50, n_heads=4, dim=128)  # the remedies work
    GPTConfig(50, n_heads=3, dim=128, head_dim=42)


@pytest.mark.parametrize(
    "field, value, default",
    [
        ("n_kv_heads", 1, "null"),
        ("head_dim", 8, "null"),
        ("window", 8, "null"),
        ("attn_dropout", 0.1, "0.0"),
        ("causal", False, "true"),
        ("qkv_bias", True, "null"),
    ],
)
def test_fields_of_attention_are_refused_without_attention(field, value, default):
    message = f"model.{field}={value} needs attention, and model.n_heads=0 leaves it out; set model.{field}={default}"
    assert refusal(50, n_heads=0, **{field: value}) == message
    GPTConfig(50, n_heads=0)  # the remedy works
    GPTConfig(50, **{field: value})


def test_a_block_needs_attention_or_an_ffn():
    message = refusal(50, n_heads=0, mlp="none")
    assert message == "model.n_heads=0 with model.mlp=none leaves the blocks empty; keep one of the two"


def test_a_missing_part_has_no_sizes():
    config = GPTConfig(50, n_heads=0, dim=33)  # without heads nothing has to divide the width, or be even
    assert (config.head_size, config.kv_heads, config.mlp_size) == (0, 0, 132)
    assert GPTConfig(50, mlp="none").mlp_size == 0
    GPTConfig(50, mlp="none", mlp_ratio=1e-9)  # which would leave an FFN without hidden units


def test_all_wrong_fields_are_reported_at_once():
    assert refusal(
        vocab_size="50", dim=1.5, bias="yes", mlp="silu", embd_dropout=2.0, mlp_ratio=-1.0, n_layers=0
    ).split("; ") == [
        "model.vocab_size='50' must be a valid integer",
        "model.n_layers=0 must be greater than or equal to 1",
        "model.dim=1.5 must be a valid integer",
        "model.mlp=silu must be 'relu', 'gelu', 'gelu_erf', 'relu2', 'swiglu' or 'none'",
        "model.mlp_ratio=-1.0 must be greater than 0",
        "model.bias='yes' must be a valid boolean",
        "model.embd_dropout=2.0 must be less than 1",
    ]


def test_combinations_are_reported_at_once_and_only_where_all_fields_are_valid():
    wrong = {"n_heads": 3, "dim": 128, "n_kv_heads": 2, "backend": "flex", "attn_dropout": 0.1}
    message = refusal(50, **wrong)
    for part in ("model.n_heads=3", "model.n_kv_heads=2", "model.backend=flex"):
        assert message.count(part) >= 1
    assert refusal(50, norm="batch", **wrong) == "model.norm=batch must be 'rmsnorm' or 'layernorm'"


def test_integers_are_accepted_as_floats():
    assert GPTConfig(50, mlp_ratio=4, attn_dropout=0, logit_softcap=30).mlp_size == 768


@pytest.mark.parametrize(
    "choices, head_size, kv_heads, mlp_size",
    [
        ({"dim": 128, "n_heads": 4}, 32, 4, 512),
        ({"dim": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 20, "mlp_ratio": 2.5}, 20, 2, 320),
        ({"dim": 128, "n_heads": 2, "n_kv_heads": 1, "mlp": "swiglu"}, 64, 1, 341),  # 2/3 of 512
    ],
)
def test_derived_sizes(choices, head_size, kv_heads, mlp_size):
    config = GPTConfig(50, **choices)
    assert (config.head_size, config.kv_heads, config.mlp_size) == (head_size, kv_heads, mlp_size)


@pytest.mark.parametrize("earlier, kind", [(True, "rmsnorm"), (False, "none")])
def test_qk_norm_of_earlier_versions(earlier, kind):
    config = GPTConfig(50, qk_norm=earlier)
    assert config == GPTConfig(50, qk_norm=kind) and config.qk_norm == kind == config.to_dict()["qk_norm"]


def test_only_rotary_positions_need_an_even_head_size():
    for pos in ("learned", "alibi", "none"):
        assert GPTConfig(50, dim=36, n_heads=4, pos=pos).head_size == 9
        assert GPTConfig(50, n_heads=0, pos=pos).head_size == 0


def test_the_hidden_width_replaces_its_ratio():
    assert GPTConfig(50, dim=128, mlp_hidden=100, mlp_ratio=1e-9).mlp_size == 100
    assert GPTConfig(50, dim=128, mlp="swiglu", mlp_hidden=100).mlp_size == 100
    assert GPTConfig(50, mlp="none", mlp_hidden=100).mlp_size == 0


def test_to_dict_gives_plain_values_that_make_an_equal_config():
    config = GPTConfig(50, window=7, n_kv_heads=2, logit_softcap=15.0, mlp="swiglu")
    values = config.to_dict()
    assert GPTConfig(**values) == config
    assert all(value is None or type(value) in (int, float, bool, str) for value in values.values())
    assert set(values) == {field.name for field in dataclasses.fields(GPTConfig)}


def test_the_defaults_are_those_of_the_nano_preset():
    preset = yaml.safe_load((CONFIGS / "model" / "nano.yaml").read_text(encoding="utf-8"))
    assert GPTConfig(**{**preset, "vocab_size": 50}) == GPTConfig(50)


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig(50).dim = 64
