"""GPTConfig: equal canonical forms exactly where models are equal, derived sizes and numbers, and what is refused."""

import dataclasses
import random
import re
from typing import Literal

import pytest
import torch
from pydantic import ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from tests.conftest import MODEL_CHOICES, NANO_PARTS, randomize
from tril.data.settings import explain, strict_settings
from tril.model.attention import BACKENDS
from tril.model.config import GPTConfig
from tril.model.gpt import GPT, check_memory
from tril.model.layers import ACTIVATIONS, NORMS
from tril.model.positions import POSITIONS

NANO = GPTConfig(31, context_length=12, n_layers=1, dim=32, **NANO_PARTS)
VALUES = {  # of each field: NANO's, values without an effect alone, and others
    **{name: tuple(choices) for name, choices in MODEL_CHOICES.items()},
    **{name: (0.0, 0.5) for name in ("embd_dropout", "attn_dropout", "resid_dropout")},
    **{name: (False, True) for name in ("bias", "key_offset", "tie_embeddings", "embed_skip", "value_embed", "causal")},
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
    used, shape = set(), (2, config.context_length)

    def recorded(name, backend):
        return lambda *arguments: used.add(name) or backend(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for name, backend in BACKENDS.items():
            patch.setitem(BACKENDS, name, recorded(name, backend))
        torch.manual_seed(0)
        model = GPT(config)
        tensors = [p.clone() for p in model.parameters()]
        randomize(model, torch.Generator().manual_seed(1))  # equal weights where the shapes are equal
        ids = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(2))
        for training in (False, True):
            torch.manual_seed(3)  # of dropout
            tensors.append(model.train(training)(ids))
    shapes = tuple((name, p.shape) for name, p in model.named_parameters())
    return tuple(x.numpy().tobytes() for x in tensors), shapes, model.flops_per_token(), shape, frozenset(used)


def test_canonical_forms_are_equal_exactly_where_models_are_equal():
    """Neighbors of a random walk differ in one or two fields, so that often none of the differences has an effect."""
    assert VALUES.keys() == {field.name for field in dataclasses.fields(GPTConfig)} - {"checkpoint_activations"}
    draw, models, n_configs = random.Random(0), {}, 0
    choices, names = dataclasses.asdict(NANO), [name for name in VALUES if name not in OFTEN]
    singles = [choices | {name: value} for name, values in VALUES.items() for value in values]
    for number in range(len(singles) + 100):
        walked = choices | {name: draw.choice(VALUES[name]) for name in draw.sample(names, 2)}
        other = singles[number] if number < len(singles) else walked
        try:
            config = GPTConfig(**other)
        except ValueError:
            continue
        choices, n_configs = choices if number < len(singles) else other, n_configs + 1
        assert config.canonical().canonical() == config.canonical()
        models.setdefault(config.canonical(), set()).add(traits(config))
    assert n_configs > 90 and len(models) < 0.9 * n_configs  # many configurations of the same model
    assert all(len(found) == 1 for found in models.values())
    assert len(set.union(*models.values())) == len(models)


def test_a_position_scheme_of_ones_own_is_kept_without_heads():
    """It may add to the embeddings; only of "rope" and "alibi" is it known that they act in attention alone."""

    @pydantic_dataclass(frozen=True, config=strict_settings("model"))
    class WithScheme(GPTConfig):
        pos: Literal["rope", "sinusoidal", "none"] = "rope"

    kept, without = (WithScheme(50, n_heads=0, pos=pos).canonical() for pos in ("sinusoidal", "rope"))
    assert kept.pos == "sinusoidal" and kept != without


def test_the_choices_are_the_rows_of_the_tables():
    choices = {name: set(values) for name, values in MODEL_CHOICES.items()}
    assert choices["mlp"] == {*ACTIVATIONS, "none"} and choices["pos"] == set(POSITIONS)
    assert choices["norm"] == NORMS.keys() - {"none"} and choices["backend"] == set(BACKENDS)


def test_derived_sizes():
    config = GPTConfig(50, dim=128, n_heads=2, n_kv_heads=1, mlp="swiglu")
    assert (config.head_size, config.kv_heads, config.mlp_size) == (64, 1, 341)  # 2/3 of 512
    assert GPTConfig(50, dim=33, n_heads=0).mlp_size == 132  # without heads nothing has to divide the width, or be even
    with_offset, without = (GPTConfig(50, dim=36, head_dim=2, key_offset=value) for value in (True, False))
    assert with_offset.canonical() == without.canonical()  # a head of one pair has no half


WRONG = [*({field.name: x} for field in dataclasses.fields(GPTConfig) for x in ([1], "192 ", 1.5j)), {"n_head": 4}]
TOGETHER = [  # choices, and what the line names
    ({"norm": "batch", "n_layers": 0}, "model.n_layers=0 .*; model.norm=batch "),
    ({"n_heads": 3, "dim": 128}, "model.n_heads=3 .*model.dim=128; use 1, 2, 4"),
    ({"mlp_ratio": 1e-9, "window": 8, "causal": False}, "window=8 .*model.causal=true; .*mlp_ratio"),
]


@pytest.mark.parametrize(("choices", "named"), [*((each, f"model.{[*each][0]}") for each in WRONG), *TOGETHER])
def test_wrong_values_and_combinations_are_named(choices, named):
    with pytest.raises(ValidationError) as error:
        GPTConfig(**{"vocab_size": 50} | choices)
    assert re.search(named, explain(error.value))


def test_what_exceeds_the_memory_is_refused_before_it_is_allocated():
    for name, value in {"dim": 12 * 10**6, "vocab_size": 2**29, "context_length": 2**29}.items():
        with pytest.raises(ValueError, match=f"model.{name}={value}"):
            check_memory(GPTConfig(**{"vocab_size": 50, name: value}))
    check_memory(GPTConfig(50))
