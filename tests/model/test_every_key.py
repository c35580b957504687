"""Every key of `model:` changes the model or is refused; `test_canonical.py` has the changes without effect.

B batch, T queries, V vocabulary.
"""

import dataclasses

import pytest
import torch

from tests.conftest import BACKENDS_SLOW_FLEX, MODEL_CHOICES, assert_close, randomize
from tril.model.attention import BACKENDS
from tril.model.gpt import GPT, GPTConfig

FIELDS = [field.name for field in dataclasses.fields(GPTConfig)]
FIELDS.remove("checkpoint_activations")  # changes memory only: test_checkpoint_activations.py
SMALL = {"vocab_size": 31, "context_length": 12, "n_layers": 2, "dim": 32}
NANO = GPTConfig(**SMALL)
B, V = 2, SMALL["vocab_size"]

# The properties of a model that are compared, in this order. Outputs cannot be compared where the parameters differ.
KINDS = ("parameters", "backend", "outputs", "outputs in training", "initial weights", "FLOPs")

CASES = {  # field -> (another value, the first of KINDS that it changes), compared with a small nano model
    "vocab_size": [(32, "parameters")],
    "context_length": [(13, "FLOPs")],
    "n_layers": [(1, "parameters"), (3, "parameters")],
    "dim": [(64, "parameters")],
    "n_heads": [
        (0, "parameters"),
        (1, "parameters"),
        (2, "parameters"),
    ],  # the gains of q and k have the length of a head; see below
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
    "mlp_hidden": [(64, "parameters"), (129, "parameters")],
    "norm": [("layernorm", "outputs")],
    "norm_eps": [(0.01, "outputs")],
    "pos": [("learned", "parameters"), ("alibi", "outputs"), ("none", "outputs")],
    "rope_base": [(100, "outputs"), (9999.0, "outputs")],
    "bias": [(True, "parameters")],
    "qkv_bias": [(True, "parameters")],
    "qk_norm": [("layernorm", "outputs"), ("none", "parameters")],
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


def changed(**choices) -> GPTConfig:
    return dataclasses.replace(NANO, **choices)


@torch.no_grad()
def traits(config: GPTConfig, monkeypatch, length: int | None = None) -> dict[str, object]:
    """The properties that KINDS names: bitwise equal for equal models."""
    used = set()

    def recorded(name, backend):
        return lambda *arguments: used.add(name) or backend(*arguments)

    with monkeypatch.context() as patch:
        for name, backend in BACKENDS.items():
            patch.setitem(BACKENDS, name, recorded(name, backend))
        torch.manual_seed(0)
        model = GPT(config)
        result = {
            "parameters": [(name, tuple(p.shape)) for name, p in model.named_parameters()],
            "initial weights": [p.clone() for p in model.parameters()],
            "FLOPs": (model.flops_per_token(), model.n_parameters(), model.n_parameters(embeddings=False)),
        }
        randomize(model, torch.Generator().manual_seed(1))  # equal weights where the shapes are equal
        ids = torch.randint(
            config.vocab_size, (B, length or config.context_length), generator=torch.Generator().manual_seed(2)
        )
        for kind, training in (("outputs", False), ("outputs in training", True)):
            torch.manual_seed(3)  # of dropout
            result[kind] = [model.train(training)(ids)]
        return result | {"backend": used}


def same(one: object, other: object) -> bool:
    if isinstance(one, list) and isinstance(one[0], torch.Tensor):
        return len(one) == len(other) and all(map(torch.equal, one, other))
    return one == other


def first_difference(one: GPTConfig, other: GPTConfig, monkeypatch) -> str | None:
    length = min(one.context_length, other.context_length)
    a, b = (traits(config, monkeypatch, length) for config in (one, other))
    return next((kind for kind in KINDS if not same(a[kind], b[kind])), None)


def test_every_field_and_every_valid_value_has_a_case():
    assert list(CASES) == FIELDS
    for name, choices in MODEL_CHOICES.items():
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


@pytest.mark.parametrize("name", BACKENDS_SLOW_FLEX)
def test_the_config_selects_the_backend(name, monkeypatch):
    default, other = traits(NANO, monkeypatch), traits(changed(backend=name), monkeypatch)
    assert (default["backend"], other["backend"]) == ({"fused"}, {name})
    assert_close(other["outputs"][0], default["outputs"][0])


def test_the_context_length_limits_the_input():
    for length in (12, 13):
        model = GPT(changed(context_length=length))
        assert model(torch.zeros(1, length, dtype=torch.long)).shape == (1, length, V)
        with pytest.raises(ValueError, match=f"{length + 1} positions exceed context_length={length}"):
            model(torch.zeros(1, length + 1, dtype=torch.long))
