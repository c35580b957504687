"""The check of generation: what passes, what it compares, and that it fails for each mutant."""

import re

import pytest
import torch

from tests.model.causality import mutants_generation
from tests.model.causality.mutants import CATALOGUE, TINY
from tril.model.causality.case import Case
from tril.model.causality.generation_checks import check_generation, visible_window
from tril.model.causality.subject import GPTSubject, randomize
from tril.model.config import GPTConfig
from tril.model.generation.sampling import SamplingConfig
from tril.model.gpt import GPT

MUTANTS = [name for name, each in CATALOGUE.items() if each.apply.__module__ == mutants_generation.__name__]


def results(config, **choices):
    model = randomize(GPT(config), torch.Generator().manual_seed(0)).eval()
    return list(check_generation(Case(GPTSubject(model, **choices), {}, [config.context_length], budget=1.0)))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"window": 3, "backend": "fused"},
        {"window": 20},
        {"pos": "learned", "context_length": 9},
        {"pos": "alibi", "n_kv_heads": 4, "logit_softcap": 5.0},
        {"context_length": 1},
        {"context_length": 2},
        {"n_heads": 0, "n_kv_heads": None},
        {"causal": False},
        {"backend": "flex"},
    ],
    ids=str,
)
def test_models_pass(choices):
    config = GPTConfig(**TINY | choices)
    found = results(config)
    assert [result for result in found if not result.passed] == []
    assert {result.check for result in found} == {"generation"}
    # Logits and tokens of three modes, greedy and sampled at the short context, and greedy at the model's own.
    longer = config.context_length > 24 and config.backend != "flex"
    assert len(found) == 3 * 2 * (3 if longer else 2)


def test_the_lengths_go_up_to_the_context():
    found = results(GPTConfig(**TINY))
    assert {result.length for result in found} == {24, 40}
    assert {result.tested for result in found} == {15 * 4 * 31, 15 * 4, 4 * 4 * 31, 4 * 4}


def test_nothing_changes_in_the_model():
    model = randomize(GPT(GPTConfig(**TINY)), torch.Generator().manual_seed(0)).eval()
    before, attributes = {name: x.clone() for name, x in model.state_dict().items()}, set(vars(model))
    list(check_generation(Case(GPTSubject(model), {}, [40], budget=1.0)))
    assert set(vars(model)) == attributes and model.config == GPTConfig(**TINY)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_fail(name, monkeypatch):
    CATALOGUE[name].apply(monkeypatch)
    failed = [result.where for result in results(CATALOGUE[name].grid.config) if not result.passed]
    assert any(re.search(CATALOGUE[name].where["generation"], where) for where in failed), failed


def test_a_wrong_token_from_the_right_logits_fails(monkeypatch):
    """The second best one, in greedy decoding."""

    def second(logits, choice):
        return logits.topk(2).indices[:, 1]

    monkeypatch.setattr("tril.model.generation.step.choose", second)
    failed = [result.where for result in results(GPTConfig(**TINY)) if not result.passed]
    assert failed and all("another token" in where for where in failed)
    assert sum("greedy" in where for where in failed) == 6


def test_a_filter_that_is_not_off_fails(monkeypatch):
    original = SamplingConfig.__init__
    monkeypatch.setattr(SamplingConfig, "__init__", lambda self, **values: original(self, **values | {"top_k": 1}))
    failed = [result.where for result in results(GPTConfig(**TINY)) if not result.passed]
    assert len(failed) == 3 and all(where.startswith("sampled") and "another token" in where for where in failed)


@pytest.mark.parametrize(
    ("length", "limit", "expected"), [(4, 4, [0, 1, 2, 3]), (5, 4, [3, 4]), (9, 4, [7, 8]), (4, 3, [3]), (2, 1, [1])]
)
def test_the_newer_half_stays(length, limit, expected):
    assert list(visible_window(tuple(range(length)), limit)) == expected


def test_other_precisions_and_subjects_are_left_out():
    class Other(GPTSubject):
        pass

    assert results(GPTConfig(**TINY), precision="bf16-mixed") == []
    case = Case(Other(randomize(GPT(GPTConfig(**TINY))).eval()), {}, [40], budget=1.0)
    assert list(check_generation(case)) == []
