import dataclasses

import pytest

from tril.model.config import GPTConfig


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("vocab_size", 0, "model.vocab_size=0 must be at least 1"),
        ("context_length", 0, "model.context_length=0 must be at least 1"),
        ("n_layers", -1, "model.n_layers=-1 must be at least 1"),
        ("dim", 0, "model.dim=0 must be at least 1"),
        ("n_heads", -1, "model.n_heads=-1 must be at least 0"),
        ("n_kv_heads", 0, "model.n_kv_heads=0 must be at least 1"),
        ("head_dim", 0, "model.head_dim=0 must be at least 1"),
        ("window", 0, "model.window=0 must be at least 1"),
        ("mlp", "silu", "model.mlp=silu must be one of relu, gelu, gelu_erf, relu2, swiglu, none"),
        ("norm", "batch", "model.norm=batch must be one of rmsnorm, layernorm"),
        ("pos", "alibi", "model.pos=alibi must be one of rope, learned, none"),
        ("init", "xavier", "model.init=xavier must be one of zero_out, gpt2"),
        ("backend", "flash", "model.backend=flash must be one of stacked, explicit, fused, flex"),
        ("mlp_ratio", 0.0, "model.mlp_ratio=0.0 must be above 0"),
        ("mlp_ratio", float("nan"), "model.mlp_ratio=nan must be above 0"),
        ("mlp_ratio", float("inf"), "model.mlp_ratio=inf must be above 0 and finite"),
        ("mlp_ratio", 1e-9, "model.mlp_ratio=1e-09 leaves the FFN without hidden units at model.dim=192"),
        ("logit_softcap", -1.0, "model.logit_softcap=-1.0 must be above 0"),
        ("logit_softcap", float("inf"), "model.logit_softcap=inf must be above 0 and finite"),
        ("embd_dropout", 1.0, "model.embd_dropout=1.0 must be at least 0 and below 1"),
        ("attn_dropout", -0.1, "model.attn_dropout=-0.1 must be at least 0 and below 1"),
        ("resid_dropout", float("nan"), "model.resid_dropout=nan must be at least 0 and below 1"),
        ("n_kv_heads", 3, "model.n_kv_heads=3 does not divide model.n_heads=4"),
        ("n_kv_heads", 8, "model.n_kv_heads=8 does not divide model.n_heads=4"),
        ("head_dim", 7, "a head size of 7 .* must be even for model.pos=rope"),
        ("dim", "192", "model.dim='192' must be int"),
        ("dim", 192.0, "model.dim=192.0 must be int"),
        ("dim", True, "model.dim=True must be int"),
        ("window", 2.5, r"model.window=2.5 must be int \| None"),
        ("bias", 1, "model.bias=1 must be bool"),
        ("mlp", None, "model.mlp=None must be str"),
        ("mlp_ratio", "4", "model.mlp_ratio='4' must be float"),
        ("mlp_ratio", True, "model.mlp_ratio=True must be float"),
        ("logit_softcap", "none", r"model.logit_softcap='none' must be float \| None"),
    ],
)
def test_every_wrong_value_is_refused_with_its_name_and_limit(field, value, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        GPTConfig(**{"vocab_size": 50, field: value})


@pytest.mark.parametrize(
    "choices, message",
    [
        ({"window": 8, "causal": False}, "model.window=8 needs model.causal=true"),
        (
            {"backend": "flex", "attn_dropout": 0.1},
            "model.backend=flex has no attention dropout .*model.attn_dropout=0.1.*backend=fused",
        ),
        ({"dim": 36, "n_heads": 4}, "a head size of 9 .* must be even"),
    ],
)
def test_impossible_combinations_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(50, **choices)


def test_heads_that_do_not_divide_the_width_name_both_and_a_remedy():
    with pytest.raises(ValueError) as error:
        GPTConfig(50, n_heads=3, dim=128)
    message = str(error.value)
    assert "model.n_heads=3" in message and "model.dim=128" in message and "\n" not in message
    assert "n_heads=1 or 2 or 4" in message and "model.head_dim" in message
    GPTConfig(50, n_heads=3, dim=128, head_dim=42)  # the remedy works


@pytest.mark.parametrize(
    "choices, message",
    [
        (
            {"n_kv_heads": 1},
            "model.n_kv_heads=1 is of attention, which model.n_heads=0 leaves out; set model.n_kv_heads=null",
        ),
        (
            {"head_dim": 8},
            "model.head_dim=8 is of attention, which model.n_heads=0 leaves out; set model.head_dim=null",
        ),
        ({"window": 8}, "model.window=8 is of attention, which model.n_heads=0 leaves out; set model.window=null"),
        (
            {"attn_dropout": 0.1},
            "model.attn_dropout=0.1 is of attention, which model.n_heads=0 leaves out; set model.attn_dropout=0.0",
        ),
        (
            {"causal": False},
            "model.causal=False is of attention, which model.n_heads=0 leaves out; set model.causal=true",
        ),
        (
            {"mlp": "none"},
            "model.n_heads=0 with model.mlp=none leaves nothing in the blocks; keep one of the two parts",
        ),
    ],
)
def test_without_attention_nothing_of_it_can_be_set(choices, message):
    with pytest.raises(ValueError) as error:
        GPTConfig(50, n_heads=0, **choices)
    assert str(error.value) == message
    GPTConfig(50, n_heads=0)  # the remedy works
    GPTConfig(50, **choices)


def test_a_part_that_is_left_out_has_no_sizes():
    config = GPTConfig(50, n_heads=0, dim=33)  # nothing has to divide the width, or be even
    assert (config.head_size, config.kv_heads, config.mlp_hidden) == (0, 0, 132)
    assert GPTConfig(50, mlp="none").mlp_hidden == 0
    GPTConfig(50, mlp="none", mlp_ratio=1e-9)  # nor any hidden unit to be left


def test_all_wrong_values_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        GPTConfig(50, n_heads=3, dim=128, mlp="silu", norm="batch", embd_dropout=2.0, mlp_ratio=-1.0, n_kv_heads=2)
    for name in (
        "n_heads=3",
        "dim=128",
        "mlp=silu",
        "norm=batch",
        "embd_dropout=2.0",
        "mlp_ratio=-1.0",
        "n_kv_heads=2",
    ):
        assert f"model.{name}" in str(error.value)
    assert str(error.value).count("model.mlp_ratio") == 1  # nor anything twice


def test_all_wrong_types_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        GPTConfig("50", dim=1.5, bias="yes")
    assert [part.split("=")[0] for part in str(error.value).split("; ")] == [
        "model.vocab_size",
        "model.dim",
        "model.bias",
    ]


def test_whole_numbers_are_floats_too():
    assert GPTConfig(50, mlp_ratio=4, attn_dropout=0, logit_softcap=30).mlp_hidden == 768


@pytest.mark.parametrize(
    "choices, head_size, kv_heads, mlp_hidden",
    [
        ({"dim": 128, "n_heads": 4}, 32, 4, 512),
        ({"dim": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 20, "mlp_ratio": 2.5}, 20, 2, 320),
        ({"dim": 128, "n_heads": 2, "n_kv_heads": 1, "mlp": "swiglu"}, 64, 1, 341),  # 2/3 of 512
    ],
)
def test_derived_sizes(choices, head_size, kv_heads, mlp_hidden):
    config = GPTConfig(50, **choices)
    assert (config.head_size, config.kv_heads, config.mlp_hidden) == (head_size, kv_heads, mlp_hidden)


def test_dict_round_trip_and_plain_values():
    config = GPTConfig(50, window=7, n_kv_heads=2, logit_softcap=15.0, mlp="swiglu")
    values = config.to_dict()
    assert GPTConfig(**values) == config
    assert all(value is None or type(value) in (int, float, bool, str) for value in values.values())
    assert set(values) == {field.name for field in dataclasses.fields(GPTConfig)}


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPTConfig(50).dim = 64


def test_unknown_choice_is_refused():
    with pytest.raises(TypeError, match="n_head"):
        GPTConfig(50, n_head=4)
