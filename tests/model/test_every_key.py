"""Every key below `model:` changes the model when it is changed, or is refused; and `canonical` tells which changes have no effect.

B batch, T queries, V vocabulary.
"""

import dataclasses
import itertools
import random

import pytest
import torch
import yaml

from tests.conftest import assert_close, randomise
from tril.model import backends
from tril.model.backends import BACKENDS
from tril.model.config import CHOICES
from tril.model.gpt import GPT, GPTConfig
from tril.scripts.common.cli import CONFIGS

FIELDS = [field.name for field in dataclasses.fields(GPTConfig)]
SMALL = {"vocab_size": 31, "context_length": 12, "n_layers": 2, "dim": 32}
NANO = GPTConfig(**yaml.safe_load((CONFIGS / "model" / "nano.yaml").read_text(encoding="utf-8")) | SMALL)
B, V = 2, SMALL["vocab_size"]

# What of a model changes, and what stays: the first of these that differs. A model with other parameters has no outputs to compare.
KINDS = ("parameters", "backend", "outputs", "outputs in training", "initial weights", "FLOPs")

CASES = {  # field -> (another value, the first of KINDS that it changes); the base is nano, smaller
    "vocab_size": [(32, "parameters")],
    "context_length": [(13, "FLOPs")],
    "n_layers": [(1, "parameters"), (3, "parameters")],
    "dim": [(64, "parameters")],
    "n_heads": [
        (0, "parameters"),
        (1, "parameters"),
        (2, "parameters"),
    ],  # the gains of q and k are as long as a head; see below
    "n_kv_heads": [(1, "parameters"), (2, "parameters")],
    "head_dim": [(4, "parameters"), (16, "parameters")],
    "mlp": [
        ("relu", "outputs"),
        ("gelu", "outputs"),
        ("gelu_erf", "outputs"),
        ("swiglu", "parameters"),
        ("none", "parameters"),
    ],
    "mlp_ratio": [(2.0, "parameters"), (4.1, "parameters")],
    "norm": [("layernorm", "outputs")],
    "pos": [("learned", "parameters"), ("none", "outputs")],
    "bias": [(True, "parameters")],
    "qk_norm": [(False, "parameters")],
    "tie_embeddings": [(False, "parameters")],
    "embd_dropout": [(0.5, "outputs in training")],
    "attn_dropout": [(0.5, "outputs in training")],
    "resid_dropout": [(0.5, "outputs in training")],
    "window": [(1, "outputs"), (11, "outputs")],
    "causal": [(False, "outputs")],
    "logit_softcap": [(1.0, "outputs"), (15, "outputs")],
    "init": [("gpt2", "initial weights")],
    "backend": [("stacked", "backend"), ("explicit", "backend"), ("flex", "backend")],
}
ILLEGAL = {
    "vocab_size": [0, None, 31.0, "31", True],
    "context_length": [0, None, 12.5],
    "n_layers": [0, -1, None, "2"],
    "dim": [0, None, 32.0, 30],
    "n_heads": [-1, None, 5, True, 4.0],
    "n_kv_heads": [0, 3, 8, 2.0],
    "head_dim": [0, 7, 8.0],
    "mlp": ["silu", "", None, False],
    "mlp_ratio": [0.0, -4.0, float("nan"), float("inf"), "4", None],
    "norm": ["batchnorm", None],
    "pos": ["alibi", None],
    "bias": [0, 1, "true", None],
    "qk_norm": [1, None],
    "tie_embeddings": [1, None],
    "embd_dropout": [-0.1, 1.0, "0", None],
    "attn_dropout": [-0.1, 1, float("nan")],
    "resid_dropout": [-0.1, 1.0, True],
    "window": [0, -1, 4.0, "4"],
    "causal": [1, None],
    "logit_softcap": [0.0, -1.0, float("inf"), "15"],
    "init": ["xavier", None],
    "backend": ["flash", None],
}


def changed(**choices) -> GPTConfig:
    return dataclasses.replace(NANO, **choices)


@torch.no_grad()
def traits(config: GPTConfig, monkeypatch, length: int | None = None) -> dict[str, object]:
    """What KINDS are about: the same for the same model, to the bit."""
    used = set()

    def recorder(own):
        return lambda *arguments: used.add(own) or own(*arguments)

    with monkeypatch.context() as patch:
        for name, own in BACKENDS.items():
            patch.setitem(BACKENDS, name, recorder(own))
        torch.manual_seed(0)
        model = GPT(config)
        found = {
            "parameters": [(name, tuple(p.shape)) for name, p in model.named_parameters()],
            "initial weights": [p.clone() for p in model.parameters()],
            "FLOPs": (model.flops_per_token(), model.n_parameters(), model.n_parameters(embeddings=False)),
        }
        randomise(model, torch.Generator().manual_seed(1))  # the same weights wherever the shapes are the same
        ids = torch.randint(
            config.vocab_size, (B, length or config.context_length), generator=torch.Generator().manual_seed(2)
        )
        for kind, training in (("outputs", False), ("outputs in training", True)):
            torch.manual_seed(3)  # dropout's
            found[kind] = [model.train(training)(ids)]
        return found | {"backend": used}


def same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(one[0], torch.Tensor):
        return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other))
    return one == other


def first_difference(one: GPTConfig, other: GPTConfig, monkeypatch) -> str | None:
    length = min(one.context_length, other.context_length)
    a, b = (traits(config, monkeypatch, length) for config in (one, other))
    return next((kind for kind in KINDS if not same(a[kind], b[kind])), None)


# -- every key -----------------------------------------------------------------------------------------------------------------------


def test_no_field_is_forgotten():
    assert list(CASES) == list(ILLEGAL) == FIELDS
    for name, choices in CHOICES.items():  # and every legal word is tried
        assert {getattr(NANO, name), *(value for value, _ in CASES[name])} == set(choices), name


@pytest.mark.parametrize("name, value, kind", [(name, *case) for name, cases in CASES.items() for case in cases])
def test_every_key_changes_the_model(name, value, kind, monkeypatch):
    assert first_difference(NANO, changed(**{name: value}), monkeypatch) == kind


@pytest.mark.parametrize(
    "choices, kind",
    [
        ({"n_heads": 2}, "outputs"),
        ({"n_heads": 2, "head_dim": 16}, "outputs"),
        ({"mlp_ratio": 4.04}, "parameters"),  # 129 hidden units
    ],
)
def test_keys_change_the_model_beyond_the_gains_of_q_and_k(choices, kind, monkeypatch):
    assert first_difference(changed(qk_norm=False), changed(qk_norm=False, **choices), monkeypatch) == kind


@pytest.mark.parametrize("name", BACKENDS)
def test_another_backend_is_another_computation_of_the_same_outputs(name, monkeypatch):
    own, other = traits(NANO, monkeypatch), traits(changed(backend=name), monkeypatch)
    assert (own["backend"], other["backend"]) == ({backends.fused}, {getattr(backends, name)})
    assert_close(other["outputs"][0], own["outputs"][0])


def test_the_context_length_is_how_much_fits():
    for length in (12, 13):
        model = GPT(changed(context_length=length))
        assert model(torch.zeros(1, length, dtype=torch.long)).shape == (1, length, V)
        with pytest.raises(ValueError, match=f"{length + 1} positions exceed context_length={length}"):
            model(torch.zeros(1, length + 1, dtype=torch.long))


@pytest.mark.parametrize("name, value", [(name, value) for name, values in ILLEGAL.items() for value in values])
def test_every_illegal_value_is_refused_with_its_name(name, value):
    with pytest.raises(ValueError) as error:
        changed(**{name: value})
    message = str(error.value)
    assert "\n" not in message and (
        f"model.{name}=" in message or (name, value) == ("head_dim", 7) and f"model.{name}," in message
    )
    assert str(value) in message


# -- canonical -----------------------------------------------------------------------------------------------------------------------

ALIKE = [  # pairs of one model
    ({}, {"n_kv_heads": 4}),
    ({}, {"head_dim": 8}),
    ({"dim": 30, "head_dim": 8}, {"dim": 30, "head_dim": 8, "n_kv_heads": 4}),
    ({}, {"window": 12}),
    ({"window": 12}, {"window": 1000}),
    ({}, {"mlp_ratio": 4}),
    ({}, {"mlp_ratio": 4.03}),  # 128 hidden units, rounded down
    ({"mlp": "swiglu", "mlp_ratio": 4.0}, {"mlp": "swiglu", "mlp_ratio": 255 / 64}),  # 85 of them
    ({"mlp": "none"}, {"mlp": "none", "mlp_ratio": 1.0}),
    ({"n_heads": 0}, {"n_heads": 0, "qk_norm": False}),
    ({"n_heads": 0}, {"n_heads": 0, "pos": "none"}),
    ({"n_heads": 0}, {"n_heads": 0, "backend": "explicit"}),
    ({"window": 1}, {"window": 1, "pos": "none"}),  # a lone key has the weight 1
    ({"context_length": 1}, {"context_length": 1, "pos": "none"}),
    ({"context_length": 1}, {"context_length": 1, "causal": False}),
    ({"context_length": 1}, {"context_length": 1, "window": 1}),
]
DIFFERENT = [  # though they may look alike
    ({"n_heads": 0}, {"n_heads": 0, "pos": "learned"}),
    ({"window": 1}, {"n_heads": 0}),
    ({"window": 1, "pos": "none"}, {"window": 2, "pos": "none"}),
    ({"window": 1}, {"window": 1, "backend": "explicit"}),
    ({"mlp": "relu"}, {"mlp": "swiglu"}),
    ({"dim": 30, "head_dim": 8}, {"dim": 30, "head_dim": 6}),
    ({"n_heads": 0}, {"n_heads": 0, "mlp_ratio": 2.0}),
    ({"mlp": "none"}, {"mlp": "none", "pos": "none"}),
]


@pytest.mark.parametrize("one, other", ALIKE)
def test_configurations_of_one_model_have_one_canonical_form(one, other, monkeypatch):
    one, other = changed(**one), changed(**other)
    assert one.canonical() == other.canonical() and hash(one.canonical()) == hash(other.canonical())
    assert first_difference(one, other, monkeypatch) is None
    assert first_difference(one, one.canonical(), monkeypatch) is None


@pytest.mark.parametrize("one, other", DIFFERENT)
def test_other_models_have_other_canonical_forms(one, other, monkeypatch):
    one, other = changed(**one), changed(**other)
    assert one.canonical() != other.canonical()
    assert first_difference(one, other, monkeypatch) is not None


@pytest.mark.parametrize("name, value", [(name, value) for name, cases in CASES.items() for value, _ in cases])
def test_what_has_an_effect_stays_in_the_canonical_form(name, value):
    assert changed(**{name: value}).canonical() != NANO.canonical()


def test_canonical_forms_tell_models_apart_as_their_outputs_do(monkeypatch):
    """Of hundreds of configurations, two have one canonical form if, and only if, they have all KINDS in common to the bit."""
    values = {
        "n_heads": (0, 4), "n_kv_heads": (None, 4, 2), "head_dim": (None, 4, 6), "window": (None, 1, 5, 6, 9), "context_length": (6, 1),
        "mlp": ("relu2", "swiglu", "none"), "mlp_ratio": (4.0, 4.03, 2), "pos": ("rope", "learned", "none"), "qk_norm": (True, False),
        "causal": (True, False), "backend": ("fused", "explicit"),
    }  # fmt: skip
    every = [dict(zip(values, choice)) for choice in itertools.product(*values.values())]
    models, seen = {}, 0
    for choices in random.Random(0).sample(every, 800):
        try:
            config = changed(n_layers=1, dim=16, **choices)
        except ValueError:
            continue
        seen += 1
        found = traits(config, monkeypatch)
        bits = tuple(
            tuple(t.numpy().tobytes() for t in found[kind])
            for kind in ("outputs", "outputs in training", "initial weights")
        )
        bits += (tuple(found["parameters"]), found["FLOPs"], frozenset(found["backend"]), config.context_length)
        models.setdefault(config.canonical(), set()).add(bits)
        assert config.canonical().canonical() == config.canonical()
    assert seen > 200 and len(models) < 0.9 * seen  # many of them are one model
    assert all(len(traits_of_one) == 1 for traits_of_one in models.values())
    assert len({next(iter(traits_of_one)) for traits_of_one in models.values()}) == len(models)
