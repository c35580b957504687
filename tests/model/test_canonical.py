"""`GPTConfig.canonical` is equal for two configurations exactly where their models are equal.

B batch, T queries, V vocabulary.
"""

import dataclasses
import random

import pytest
import torch

from tests.conftest import MODEL_CHOICES, randomize
from tril.model.attention import BACKENDS
from tril.model.gpt import GPT, GPTConfig

NANO = GPTConfig(31, context_length=12, n_layers=1, dim=32)
VALUES = {  # of each field: NANO's, values without an effect alone, and others
    **{name: tuple(choices) for name, choices in MODEL_CHOICES.items()},
    **{name: (0.0, 0.5) for name in ("embd_dropout", "attn_dropout", "resid_dropout")},
    **{name: (False, True) for name in ("bias", "tie_embeddings", "causal")},
    "vocab_size": (31, 32),
    "context_length": (12, 13),
    "n_layers": (1, 2),
    "dim": (32, 64),
    "n_heads": (4, 0, 1, 2),
    "n_kv_heads": (None, 4, 1, 2),
    "head_dim": (None, 8, 6),
    "mlp_ratio": (4.0, 4, 4.03, 4.1, 2.0),  # 4.03: 128 hidden units, rounded down
    "mlp_hidden": (None, 128, 64, 129),
    "norm_eps": (None, 0.01),
    "rope_base": (10_000.0, 50.0),
    "qkv_bias": (None, False, True),
    "qk_norm": (True, "rmsnorm", False, "none", "layernorm"),
    "window": (None, 12, 1000, 11, 5),
    "logit_softcap": (None, 1.0, 15),
}
OFTEN = ("vocab_size", "n_layers", "dim", "logit_softcap", "embd_dropout", "resid_dropout", "init", "tie_embeddings")


@torch.no_grad()
def traits(config: GPTConfig) -> tuple:
    """What a model is: equal, bit for bit, for equal models."""
    used, (B, T) = set(), (2, config.context_length)

    def recorded(name, backend):
        return lambda *arguments: used.add(name) or backend(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name, backend in BACKENDS.items():
            patch.setitem(BACKENDS, name, recorded(name, backend))
        torch.manual_seed(0)
        model = GPT(config)
        tensors = [p.clone() for p in model.parameters()]
        randomize(model, torch.Generator().manual_seed(1))  # equal weights where the shapes are equal
        ids = torch.randint(config.vocab_size, (B, T), generator=torch.Generator().manual_seed(2))
        for training in (False, True):
            torch.manual_seed(3)  # of dropout
            tensors.append(model.train(training)(ids))
    shapes = tuple((name, p.shape) for name, p in model.named_parameters())
    return tuple(x.numpy().tobytes() for x in tensors), shapes, model.flops_per_token(), T, frozenset(used)


def changed(**choices) -> GPTConfig:
    return dataclasses.replace(NANO, **choices)


def test_every_field_has_another_value_that_changes_the_model():
    assert VALUES.keys() == {field.name for field in dataclasses.fields(GPTConfig)} - {"checkpoint_activations"}
    nano = traits(NANO)
    for name, values in VALUES.items():
        equal = []
        for config in (changed(**{name: value}) for value in values if (name, value) != ("backend", "flex")):
            equal.append(traits(config) == nano)
            assert (config.canonical() == NANO.canonical()) == equal[-1], config
            assert hash(config.canonical()) == hash(config.canonical().canonical())
        assert any(equal) and not all(equal), name


def test_canonical_forms_are_equal_exactly_where_models_are_equal():
    """Neighbors of a random walk differ in one or two fields, so that often none of the differences has an effect."""
    draw, models, n_configs = random.Random(0), {}, 0
    choices, names = dataclasses.asdict(NANO), [name for name in VALUES if name not in OFTEN]
    for _ in range(900):
        other = choices | {name: draw.choice(VALUES[name]) for name in draw.sample(names, 2)}
        if other["backend"] == "flex":
            continue
        try:
            config = GPTConfig(**other)
        except ValueError:
            continue
        choices, n_configs = other, n_configs + 1
        assert config.canonical().canonical() == config.canonical()
        models.setdefault(config.canonical(), set()).add(traits(config))
    assert n_configs > 200 and len(models) < 0.9 * n_configs  # many configurations of the same model
    assert all(len(found) == 1 for found in models.values())
    assert len(set.union(*models.values())) == len(models)
