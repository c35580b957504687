"""Certificates of whole grids. The mutants, which must fail, are in test_mutants.py."""

import json
import math
from collections import Counter

import pytest
import torch

from tests.conftest import BACKENDS, GPT2, TRAINABLE, randomize, tiny_gpt
from tril.model.causality.canary import KINDS, canary
from tril.model.causality.case import SLACK, Case, Result
from tril.model.causality.certificate import CHECKS, Certificate, certify
from tril.model.causality.checks import run_checks
from tril.model.causality.grids import gpt_grid
from tril.model.causality.grids.gpt_grid import gpt_cases, sharpen
from tril.model.causality.plot import edges, plot
from tril.model.causality.receptive_field import expected_dependencies
from tril.model.causality.subject import GPTSubject
from tril.model.gpt import GPT, GPTConfig
from tril.model.masks import causal_mask

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
@pytest.mark.parametrize(
    "backends", [("fused",), pytest.param(("explicit", "stacked"), marks=pytest.mark.slow)], ids=["fused", "others"]
)
@pytest.mark.usefixtures("short_canary")
def test_causal_models_are_certified(choices, backends):
    config = GPTConfig(**TINY | choices)
    certificate = certify("tiny", gpt_cases(config, backends=backends))
    assert certificate.passed, certificate.failures_by_check()
    assert set(certificate.checks()) == set(CHECKS)
    wanted = {1, min(2, config.context_length), min(37, config.context_length), config.context_length}
    assert wanted <= {result.length for result in certificate.results}


@pytest.mark.parametrize("backends", [TRAINABLE, pytest.param(("flex",), marks=pytest.mark.slow)], ids=str)
@pytest.mark.usefixtures("short_canary")
def test_every_backend_is_certified(backends):
    config = GPTConfig(**TINY | {"context_length": 9})
    certificate = certify("tiny", gpt_cases(config, precisions=("32-true",), backends=backends))
    assert certificate.passed, certificate.failures_by_check()
    words = {word for result in certificate.results[1:] for word in result.case.split()}
    assert {f"backend={name}" for name in backends} <= words


@pytest.mark.parametrize(
    ("device", "head_dim", "backends"), [("cpu", 8, BACKENDS), ("cuda", 8, TRAINABLE), ("cuda", 16, BACKENDS)]
)
def test_flex_is_left_out_for_heads_that_it_cannot_compute(device, head_dim, backends, monkeypatch):
    monkeypatch.setattr(GPT, "to", lambda self, device: self)  # the test computes nothing
    cases = gpt_cases(GPTConfig(**TINY, head_dim=head_dim), device=device)
    assert {case.labels["backend"] for case in cases} == set(backends)


@pytest.mark.usefixtures("short_canary")
def test_a_trained_checkpoint_is_certified_with_its_own_weights_too():
    config = GPTConfig(**TINY)
    cases = list(gpt_cases(config, randomize(GPT(config)).state_dict(), precisions=("32-true",), backends=("fused",)))
    assert [case.labels["weights"] for case in cases[:1]] == ["trained"] and cases[0].full_past and cases[0].equivalence
    assert certify("tiny", cases).passed


def test_a_model_without_mask_fails_every_check_that_can_detect_it():
    config = GPTConfig(**TINY | {"causal": False})
    certificate = certify("no mask", gpt_cases(config, precisions=("32-true",), backends=("explicit",)))
    assert not certificate.passed
    assert {"no future", "attention", "padding", "canary"} <= set(certificate.failures_by_check())
    assert {"rows", "documents", "all of the past"}.isdisjoint(
        certificate.failures_by_check()
    )  # these hold without a mask
    first = certificate.failures_by_check()["attention"][0]
    assert first.where.startswith("layer 0, head 0, query 0, key 1: weight")
    assert (first.layer, first.head, first.query, first.key) == (0, 0, 0, 1)
    assert "query 0 changes with key 1, first in blocks.0" in certificate.failures_by_check()["no future"][0].where
    assert certificate.summary()["failed"][0].startswith("attention: layer 0, head 0, query 0, key 1")
    assert "FAILS: attention: layer 0" in certificate.line()
    assert json.loads(json.dumps(certificate.to_dict(), allow_nan=False))["passed"] is False


@pytest.mark.usefixtures("short_canary")
def test_the_dependencies_of_the_first_case_are_complete_and_plotted(tmp_path):
    config = GPTConfig(**TINY | {"window": 4})
    certificate = certify("tiny", gpt_cases(config, precisions=("32-true",), backends=()))
    band = expected_dependencies(40, [4, 4])
    for name in ("gradient", "perturbation"):
        assert torch.equal(certificate.dependencies[name] > 0, band)
    plot(tmp_path / "picture.png", certificate)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    right, left = edges(band)
    assert right[0][:4] == [0.5, 0.5, 1.5, 1.5] and right[1][:4] == [-0.5, 0.5, 0.5, 1.5]
    assert left[0][-1] == 40 - 1 - 6 - 0.5
    assert len(edges(expected_dependencies(40, [None]))) == 1


def test_every_backend_has_a_length_at_which_a_long_window_hides_something():
    config = GPTConfig(**TINY | {"context_length": 128, "window": 64})
    windows = [case for case in gpt_cases(config) if case.labels["weights"] == "random" and case.equivalence]
    assert {case.labels["backend"] for case in windows} == {"explicit", "stacked", "fused", "flex"}
    assert all(65 in case.lengths for case in windows)


def test_every_case_that_decodes_has_a_text_of_at_least_17_tokens():
    cases = [case for case in gpt_cases(GPTConfig(**TINY | {"context_length": 300})) if case.equivalence]
    assert {case.labels["backend"] for case in cases} == set(BACKENDS)
    assert all(17 <= max(n for n in case.lengths if n < 300) <= 37 for case in cases)


def test_emulated_bf16_has_short_texts_and_few_gradients(monkeypatch):
    """The longest texts are still replaced as a whole."""
    for in_hardware, odd, gradients, rows in ((True, 37, 64, 8), (False, 17, 8, 4)):
        monkeypatch.setattr(gpt_grid, "has_bf16", lambda device, found=in_hardware: found)
        cases = list(gpt_cases(GPTConfig(**TINY | {"context_length": 300})))
        low = [case for case in cases if "bf16" in case.name]
        assert {max(case.lengths) for case in low} == {odd} and {case.max_gradients for case in low} == {gradients}
        assert all(case.redrawn == [300] and case.rows == rows for case in low if case.equivalence)
        assert Counter((case.labels["weights"], case.labels["backend"]) for case in low) == {
            ("initial", "fused"): 1,  # those of the other backends hide more than random weights
            **{("random", backend): 3 for backend in ("stacked", "explicit", "fused")},
            **{("sharp", backend): 1 for backend in ("stacked", "explicit", "fused")},
        }
        fused = [case for case in cases if "bf16" not in case.name and case.labels["backend"] != "flex"]
        assert {max(case.lengths) for case in fused[1:]} == {37}


def test_gradients_of_long_texts_are_sampled_and_single_tokens_are_not():
    config = GPTConfig(**TINY | {"context_length": 130, "n_layers": 1, "dim": 8, "n_heads": 1})
    first = next(gpt_cases(config))
    list(run_checks(first))
    tested = {name: (~matrix.isnan()).any(1) for name, matrix in first.dependencies.items()}
    assert tested["perturbation"].all() and tested["gradient"].sum() == 64
    exhaustive = next(gpt_cases(config, exhaustive=True))
    assert len(exhaustive.positions(130, exhaustive.max_gradients)) == 130


def test_long_contexts_are_sampled_unless_the_budget_is_infinite():
    case = Case(GPTSubject(tiny_gpt(context_length=400)), {}, [400], budget=1e9)
    cost = 6 * case.subject.n_parameters() * 400
    assert len(case.positions(400)) == int(1e9 / cost) < 400
    case.budget = math.inf
    assert len(case.positions(400)) == 400
    case.budget = 0
    assert len(case.positions(400)) == 8


def test_bounds_are_the_measured_rounding():
    case = Case(GPTSubject(tiny_gpt()), {}, [12], budget=math.inf)
    generator = torch.Generator().set_state(case.generator.get_state())
    plain, ids = case.subject.plain(), torch.randint(1, 31, (4, 12), generator=generator)
    with torch.no_grad():
        rounding = (plain(ids).double() - plain.in_float64()(ids)).abs().max().item()
    assert plain.module.config.backend == "fused" and plain.module.blocks[0].attn.backend == "explicit"
    assert case.bound() == SLACK * rounding and 1e-8 < rounding < 1e-4
    assert case.hidden_bound(noise=1e-9) == SLACK * 1e-9
    coarse = Case(GPTSubject(tiny_gpt(), precision="bf16-mixed"), {}, [12], budget=math.inf)
    assert coarse.bound() > 100 * case.bound()


class PrefixLM(GPTSubject):
    """A model without causal mask, called with the mask of a prefix language model.

    All positions are expected to see the first `expected_prefix` ones.
    """

    def __init__(self, model, *, prefix, expected_prefix):
        super().__init__(model)
        self.prefix, self.expected_prefix = prefix, expected_prefix
        self.run = lambda ids: model(ids, mask=causal_mask(*2 * ids.shape[1:]) | (torch.arange(ids.shape[1]) < prefix))

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
    certificate = Certificate("prefix", list(run_checks(Case(subject, {}, [9], math.inf, equivalence=False))))
    assert set(certificate.failures_by_check()) == failures


def test_sharp_scores_exceed_a_finite_mask():
    for choices in ({}, {"qk_norm": False}):
        model = tiny_gpt(**choices)
        sharpen(model)
        sizes = []
        for name in ("q", "k"):
            layer = getattr(model.blocks[0].attn, f"{name}_proj" if choices else f"{name}_norm")
            layer.register_forward_hook(lambda _, __, out, sizes=sizes: sizes.append(out.abs().mean()))
        model(torch.randint(31, (1, 12)))
        assert sizes[0] * sizes[1] * 8**0.5 > 1e4  # q k / sqrt(D), D = 8


def test_the_table_says_which_values_have_to_be_above_0():
    past = [Result("all of the past", "case", 8, True, worst, 0.0, 36) for worst in (0.25, 0.0625, 3.0)]
    future = [Result("no future", "case", 8, True, worst, 1e-6, 28) for worst in (1e-9, 1e-7)]
    table = Certificate("tiny", [*past, *future]).table()
    assert "all of the past      3      0          108  min 0.062 (> 0)        every visible position" in table
    assert "no future            2      0           56  1e-07 (1e-06)          no logit depends" in table


def test_an_empty_certificate_does_not_pass():
    assert not Certificate("nothing").passed


@pytest.mark.parametrize("causal", [True, False])
def test_the_canary_test_passes_only_with_a_mask(causal):
    test = canary(GPTSubject(GPT(GPTConfig(**TINY | {"causal": causal}))))
    assert test.bound == math.log(KINDS) and test.n_tokens == 128 * 32
    assert test.passed is causal
    if not causal:
        assert test.below > 10  # standard errors


def test_a_canary_with_nan_loss_does_not_pass():
    model = tiny_gpt()
    model.head.register_forward_hook(lambda module, args, out: out * math.nan)
    assert not canary(GPTSubject(model), steps=1).passed
