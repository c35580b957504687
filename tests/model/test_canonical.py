"""`GPTConfig.canonical` is equal for two configurations exactly where their models are equal."""

import random

import pytest

from tests.model.test_every_key import CASES, NANO, changed, first_difference, traits
from tril.model.gpt import GPTConfig

EQUAL = [  # pairs of configurations of the same model
    ({}, {"n_kv_heads": 4}),
    ({}, {"head_dim": 8}),
    ({"dim": 30, "head_dim": 8}, {"dim": 30, "head_dim": 8, "n_kv_heads": 4}),
    ({}, {"window": 12}),
    ({"window": 12}, {"window": 1000}),
    ({}, {"mlp_ratio": 4}),
    ({}, {"mlp_ratio": 4.03}),  # 128 hidden units, rounded down
    ({"mlp": "swiglu", "mlp_ratio": 4.0}, {"mlp": "swiglu", "mlp_ratio": 255 / 64}),  # 85 hidden units
    ({"mlp": "none"}, {"mlp": "none", "mlp_ratio": 1.0}),
    ({}, {"mlp_hidden": 128}),
    ({"mlp": "swiglu"}, {"mlp": "swiglu", "mlp_hidden": 85}),
    ({"mlp_hidden": 64}, {"mlp_hidden": 64, "mlp_ratio": 1.0}),
    ({"mlp": "none"}, {"mlp": "none", "mlp_hidden": 7}),
    ({}, {"qk_norm": True}),
    ({"qk_norm": "none"}, {"qk_norm": False}),
    ({}, {"qkv_bias": False}),
    ({"bias": True}, {"bias": True, "qkv_bias": True}),
    ({"norm": "layernorm", "qk_norm": "none"}, {"norm": "layernorm", "qk_norm": "none", "norm_eps": 1e-5}),
    ({"norm": "layernorm", "qk_norm": "layernorm"}, {"norm": "layernorm", "qk_norm": "layernorm", "norm_eps": 1e-5}),
    ({"n_heads": 0, "norm": "layernorm"}, {"n_heads": 0, "norm": "layernorm", "norm_eps": 1e-5}),
    ({"pos": "learned"}, {"pos": "learned", "rope_base": 50.0}),
    ({"pos": "alibi"}, {"pos": "alibi", "rope_base": 50.0}),
    ({"pos": "none"}, {"pos": "none", "rope_base": 50.0}),
    ({"head_dim": 2}, {"head_dim": 2, "rope_base": 50.0}),  # its frequency is 50^0
    ({"window": 1}, {"window": 1, "rope_base": 50.0}),
    ({"n_heads": 0}, {"n_heads": 0, "rope_base": 50.0}),
    ({"n_heads": 0}, {"n_heads": 0, "qk_norm": False}),
    ({"n_heads": 0}, {"n_heads": 0, "qk_norm": "layernorm"}),
    ({"n_heads": 0}, {"n_heads": 0, "pos": "none"}),
    ({"n_heads": 0}, {"n_heads": 0, "pos": "alibi"}),
    ({"n_heads": 0}, {"n_heads": 0, "backend": "explicit"}),
    ({"window": 1}, {"window": 1, "pos": "none"}),  # the weight of a single key is 1
    ({"window": 1}, {"window": 1, "pos": "alibi"}),
    ({"window": 1}, {"window": 1, "qk_norm": "layernorm"}),
    ({"window": 1, "norm": "layernorm"}, {"window": 1, "norm": "layernorm", "norm_eps": 1e-5}),
    ({"context_length": 1}, {"context_length": 1, "pos": "none"}),
    ({"context_length": 1}, {"context_length": 1, "pos": "alibi"}),
    ({"context_length": 1}, {"context_length": 1, "causal": False}),
    ({"context_length": 1}, {"context_length": 1, "window": 1}),
]
DIFFERENT = [
    ({"n_heads": 0}, {"n_heads": 0, "pos": "learned"}),
    ({"window": 1}, {"n_heads": 0}),
    ({"window": 1, "pos": "none"}, {"window": 2, "pos": "none"}),
    ({"window": 1}, {"window": 1, "backend": "explicit"}),
    ({"window": 1}, {"window": 1, "qk_norm": "none"}),
    ({"mlp": "relu"}, {"mlp": "swiglu"}),
    ({"dim": 30, "head_dim": 8}, {"dim": 30, "head_dim": 6}),
    ({"n_heads": 0}, {"n_heads": 0, "mlp_ratio": 2.0}),
    ({"mlp": "none"}, {"mlp": "none", "pos": "none"}),
    ({"pos": "alibi"}, {"pos": "none"}),
    ({"head_dim": 4}, {"head_dim": 4, "rope_base": 50.0}),
    ({"norm": "layernorm"}, {"norm": "layernorm", "norm_eps": 1e-5}),  # q and k have an rmsnorm
    ({"qk_norm": "layernorm"}, {"qk_norm": "layernorm", "norm_eps": 1e-5}),
    ({"bias": True}, {"bias": True, "qkv_bias": False}),
    ({"mlp_hidden": 127}, {}),
]


@pytest.mark.parametrize("one, other", EQUAL)
def test_configurations_of_the_same_model_have_the_same_canonical_form(one, other, monkeypatch):
    one, other = changed(**one), changed(**other)
    assert one.canonical() == other.canonical() and hash(one.canonical()) == hash(other.canonical())
    assert first_difference(one, other, monkeypatch) is None
    assert first_difference(one, one.canonical(), monkeypatch) is None


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_different_models_have_different_canonical_forms(one, other, monkeypatch):
    one, other = changed(**one), changed(**other)
    assert one.canonical() != other.canonical()
    assert first_difference(one, other, monkeypatch) is not None


@pytest.mark.parametrize("name, value", [(name, value) for name, cases in CASES.items() for value, _ in cases])
def test_changes_with_an_effect_stay_in_the_canonical_form(name, value):
    assert changed(**{name: value}).canonical() != NANO.canonical()


def random_configs(n: int) -> list[GPTConfig]:
    values = {
        "n_heads": (0, 4),
        "n_kv_heads": (None, 4, 2),
        "head_dim": (None, 4, 6),
        "window": (None, 1, 5, 6, 9),
        "context_length": (6, 1),
        "mlp": ("relu2", "swiglu", "none"),
        "mlp_ratio": (4.0, 4.03, 2),
        "mlp_hidden": (None, 64, 32),
        "norm": ("rmsnorm", "layernorm"),
        "norm_eps": (None, 1e-5),
        "pos": ("rope", "learned", "alibi", "none"),
        "rope_base": (10_000.0, 50.0),
        "bias": (True, False),
        "qkv_bias": (None, True, False),
        "qk_norm": (True, False, "layernorm"),
        "causal": (True, False),
        "backend": ("fused", "explicit"),
    }
    draw = random.Random(0)
    choices, configs = {name: draw.choice(options) for name, options in values.items()}, []
    for _ in range(n):  # neighbors differ in one or two fields, so that often none of the differences has an effect
        other = choices | {name: draw.choice(values[name]) for name in draw.sample(list(values), 2)}
        try:
            configs.append(changed(n_layers=1, dim=16, **other))
        except ValueError:
            continue
        choices = other
    return configs


def test_canonical_forms_are_equal_exactly_where_models_are_equal(monkeypatch):
    """Two of hundreds of configurations have the same canonical form if, and only if, all KINDS are bitwise equal."""
    models, configs = {}, random_configs(700)
    for config in configs:
        result = traits(config, monkeypatch)
        tensors = [*result["outputs"], *result["outputs in training"], *result["initial weights"]]
        key = [tuple(t.numpy().tobytes() for t in tensors), tuple(result["parameters"]), result["FLOPs"]]
        key += [frozenset(result["backend"]), config.context_length]
        models.setdefault(config.canonical(), set()).add(tuple(key))
        assert config.canonical().canonical() == config.canonical()
    assert len(configs) > 200 and len(models) < 0.9 * len(configs)  # many configurations of the same model
    assert all(len(keys) == 1 for keys in models.values())
    assert len({next(iter(keys)) for keys in models.values()}) == len(models)
