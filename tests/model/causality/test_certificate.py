"""Whole certificates: models that deserve one get it, and a leak is named. The catalogue of mutants is in test_mutants.py."""

import json
import math

import pytest
import torch

from tests.conftest import BACKENDS, GPT2, TRAINABLE, randomise, tiny_gpt
from tril.model.causality.canary import KINDS, canary
from tril.model.causality.case import SLACK, Cell
from tril.model.causality.certificate import CHECKS, Certificate
from tril.model.causality.checks import run_checks
from tril.model.causality.grids.gpt_grid import certify, gpt_cells, sharpen
from tril.model.causality.plot import edges, plot
from tril.model.causality.receptive_field import expected
from tril.model.causality.subject import GPTSubject
from tril.model.gpt import GPT, GPTConfig
from tril.model.masks import prefix_mask

TINY = {"vocab_size": 31, "context_length": 40, "n_layers": 2, "dim": 32, "n_heads": 4}


@pytest.mark.parametrize(
    "choices",
    [
        {"n_kv_heads": 2, "mlp": "swiglu", "tie_embeddings": True},
        {key: GPT2[key] for key in ("pos", "norm", "mlp", "bias", "qk_norm", "tie_embeddings", "init")},
        {"window": 5, "pos": "none", "logit_softcap": 5.0, "mlp": "relu", "norm": "layernorm"},
        {"window": 1, "context_length": 9},
        {"context_length": 1},
    ],
    ids=["grouped", "gpt2", "window", "window of one", "context of one"],
)
def test_causal_models_are_certified(choices):
    config = GPTConfig(**TINY | choices)
    certificate = certify("tiny", gpt_cells(config, backends=("explicit", "fused")))
    assert certificate.passed, certificate.failures()
    assert set(certificate.checks()) == set(CHECKS)
    wanted = {1, min(2, config.context_length), min(37, config.context_length), config.context_length}
    assert wanted <= {result.length for result in certificate.results}


def test_every_backend_is_certified():
    certificate = certify("tiny", gpt_cells(GPTConfig(**TINY | {"context_length": 9}), precisions=("32-true",)))
    assert certificate.passed, certificate.failures()
    assert {f"backend={name}" for name in BACKENDS} == {
        word for r in certificate.results for word in r.cell.split() if word.startswith("backend=")
    }


@pytest.mark.parametrize(
    ("device", "head_dim", "backends"), [("cpu", 8, BACKENDS), ("cuda", 8, TRAINABLE), ("cuda", 16, BACKENDS)]
)
def test_flex_is_left_out_where_it_has_no_kernel_for_the_heads(device, head_dim, backends, monkeypatch):
    monkeypatch.setattr(GPT, "to", lambda self, device: self)  # nothing is computed here
    cells = gpt_cells(GPTConfig(**TINY, head_dim=head_dim), device=device)
    assert {cell.labels["backend"] for cell in cells} == set(backends)


def test_a_trained_checkpoint_is_certified_with_its_own_weights_too():
    config = GPTConfig(**TINY)
    cells = list(gpt_cells(config, randomise(GPT(config)).state_dict(), precisions=("32-true",), backends=("fused",)))
    assert [cell.labels["weights"] for cell in cells[:1]] == ["trained"] and cells[0].past and cells[0].function
    assert certify("tiny", cells).passed


def test_a_model_without_mask_fails_by_every_check_that_can_see_it(tmp_path):
    config = GPTConfig(**TINY | {"causal": False})
    certificate = certify("no mask", gpt_cells(config, precisions=("32-true",), backends=("explicit",)))
    assert not certificate.passed
    assert {"no future", "attention", "decoding", "canary"} <= set(certificate.failures())
    assert {"rows", "documents", "all of the past"}.isdisjoint(certificate.failures())  # which do hold
    assert certificate.failures()["attention"][0].where.startswith("layer 0, head 0, query 0, key 1: weight")
    assert "query 0 changes with key 1, first in layer 0" in certificate.failures()["no future"][0].where
    assert certificate.summary()["failed"][0].startswith("attention: layer 0, head 0, query 0, key 1")
    assert "FAILS: attention: layer 0" in certificate.line()
    assert json.loads(json.dumps(certificate.to_dict(), allow_nan=False))["passed"] is False


def test_the_reach_of_the_first_cell_covers_every_pair_and_is_drawn(tmp_path):
    config = GPTConfig(**TINY | {"window": 4})
    certificate = certify("tiny", gpt_cells(config, precisions=("32-true",), backends=()))
    band = expected(40, [4, 4])
    for name in ("gradient", "perturbation"):
        assert torch.equal(certificate.reach[name] > 0, band)
    plot(tmp_path / "picture.png", certificate)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    right, left = edges(band)
    assert right[0][:4] == [0.5, 0.5, 1.5, 1.5] and right[1][:4] == [-0.5, 0.5, 0.5, 1.5]
    assert left[0][-1] == 40 - 1 - 6 - 0.5
    assert len(edges(expected(40, [None]))) == 1


def test_long_contexts_are_sampled_unless_all_is_asked_for():
    cell = Cell(GPTSubject(tiny_gpt(context_length=400)), {}, [400], budget=1e9)
    cost = 6 * cell.subject.n_parameters() * 400
    assert len(cell.positions(400)) == int(1e9 / cost) < 400
    cell.budget = math.inf
    assert len(cell.positions(400)) == 400
    cell.budget = 0
    assert len(cell.positions(400)) == 8


def test_bounds_are_the_measured_rounding():
    cell = Cell(GPTSubject(tiny_gpt()), {}, [12], budget=math.inf)
    generator = torch.Generator().set_state(cell.generator.get_state())
    plain, ids = cell.subject.plain(), torch.randint(1, 31, (1, 12), generator=generator)
    with torch.no_grad():
        rounding = (plain(ids).double() - plain.in_float64()(ids)).abs().max().item()
    assert plain.module.config.backend == "fused" and plain.module.blocks[0].attn.backend == "explicit"
    assert cell.bound() == SLACK * rounding and 1e-8 < rounding < 1e-4
    assert cell.bound_of_hidden(noise=1e-9) == SLACK * 1e-9
    coarse = Cell(GPTSubject(tiny_gpt(), precision="bf16-mixed"), {}, [12], budget=math.inf)
    assert coarse.bound() > 100 * cell.bound()


class PrefixLM(GPTSubject):
    """A model without a causal mask of its own, given that of a prefix language model; `prefix` positions are expected to be seen by all."""

    def __init__(self, model, *, prefix, expected_prefix):
        super().__init__(model)
        self.prefix, self.expected_prefix = prefix, expected_prefix
        self.run = lambda ids: model(ids, mask=prefix_mask(ids.shape[1], ids.shape[1], prefix))

    def visible(self, length, layer=None):
        return torch.tensor(
            [[j <= i or i < length and j < self.expected_prefix for j in range(length)] for i in range(length)]
        )


@pytest.mark.parametrize(
    ("expected_prefix", "failures"),
    [(4, set()), (3, {"no future", "attention"}), (5, {"all of the past", "attention"})],
)
@pytest.mark.parametrize("backend", TRAINABLE)
def test_a_prefix_language_model_is_certified_as_one(backend, expected_prefix, failures):
    subject = PrefixLM(tiny_gpt(causal=False, backend=backend), prefix=4, expected_prefix=expected_prefix)
    certificate = Certificate("prefix", list(run_checks(Cell(subject, {}, [9], math.inf, function=False))))
    assert set(certificate.failures()) == failures


def test_sharp_scores_are_beyond_a_finite_mask():
    for choices in ({}, {"qk_norm": False}):
        model = tiny_gpt(**choices)
        sharpen(model)
        seen = []
        for name in ("q", "k"):
            getattr(model.blocks[0].attn, f"{name}_proj" if choices else f"{name}_norm").register_forward_hook(
                lambda _, __, out: seen.append(out)
            )
        model(torch.randint(31, (1, 12)))
        assert seen[0].abs().mean() * seen[1].abs().mean() * 8**0.5 > 1e4  # q k / sqrt(D) with D = 8 alike terms


def test_nothing_measured_is_no_certificate():
    assert not Certificate("nothing").passed


@pytest.mark.parametrize("causal", [True, False])
def test_the_canary_lives_only_with_a_mask(causal):
    found = canary(GPTSubject(GPT(GPTConfig(**TINY | {"causal": causal}))))
    assert found.bound == math.log(KINDS) and found.n_tokens == 128 * 32
    assert found.passed is causal
    if not causal:
        assert found.below > 10  # standard errors; chance would be 5 once in 3.5 million


def test_a_canary_that_breaks_down_has_not_sung():
    model = tiny_gpt()
    model.head.register_forward_hook(lambda module, args, out: out * math.nan)
    assert not canary(GPTSubject(model), steps=1).passed
