"""The scaling law: parameters are recovered from the losses of a law; unusable sweeps are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize_scalar

from tests.scripts.ablation.law_sweeps import HOFFMANN, LAWS, SIZES, STEPS, assert_same, law_sweep, points_from
from tests.scripts.experiments.synthetic import write_sweep
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.scaling_law import (
    DELTA,
    EXPONENTS,
    MIN_FIT,
    MIN_LAW,
    Law,
    fit,
    jacobian,
    points_of,
    residuals,
)
from tril.scripts.ablation.scaling_plots import plot_law
from tril.scripts.ablation.scaling_predictions import MIN_HELD_OUT


@pytest.mark.parametrize("true", [*LAWS[:2], *(pytest.param(law, marks=pytest.mark.slow) for law in LAWS[2:])], ids=str)
def test_law_is_recovered_from_its_losses(true):
    law = fit(points_from(true))
    assert_same(law, true, rel=1e-6)
    assert law.bounds == ()


@pytest.mark.parametrize("outlier", [0, 7, 19])
def test_one_outlier_moves_the_law_little(outlier):
    """An outlier of a tenth of the loss. Least squares of log L would be off by per cents everywhere."""
    points = points_from(LAWS[1])
    wrong = points.loss.copy()
    wrong[outlier] *= 1.1
    law, others = fit(points.with_loss(wrong)), np.arange(len(points)) != outlier
    np.testing.assert_allclose(law.loss(points.parameters, points.tokens)[others], points.loss[others], rtol=DELTA)


def test_residuals_are_those_of_the_law_and_the_jacobian_agrees_with_differences():
    points = points_from(LAWS[1])
    n, d = np.log(points.parameters / 2e6), np.log(points.tokens / 6e5)
    theta = np.array([math.log(2.0), math.log(0.6), math.log(1.9), 0.3, 0.55])
    data = n, d, np.log(points.loss)
    fitted = 2.0 + 0.6 * np.exp(-0.3 * n) + 1.9 * np.exp(-0.55 * d)
    np.testing.assert_allclose(residuals(theta, *data), np.log(fitted / points.loss), rtol=1e-12)
    differences = approx_fprime(theta, lambda at: residuals(at, *data), 1e-7)  # (n, 5)
    np.testing.assert_allclose(jacobian(theta, *data), differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("flops", [1e14, 1e20])
def test_best_split_is_the_minimum_found_by_search(law, flops):
    def loss(log_n):
        return float(law.loss(np.exp(log_n), flops / 6 / np.exp(log_n)))

    found = minimize_scalar(loss, bounds=(2, 40), options={"xatol": 1e-9})
    n, d = law.optimum(flops)
    assert 6 * n * d == pytest.approx(flops, rel=1e-12)
    assert math.log(n) == pytest.approx(found.x, abs=1e-3)
    assert law.loss(n, d) == pytest.approx(found.fun, rel=1e-12)


def test_figures_of_hoffmann_et_al():
    """Appendix D.3: for alpha = 0.34 and beta = 0.28, N grows like compute^0.46 (0.452 from the rounded values)."""
    (small, _), (large, _) = HOFFMANN.optimum(1e20), HOFFMANN.optimum(1e21)
    assert math.log10(large / small) == pytest.approx(0.28 / 0.62, rel=1e-9)
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.69 + 0.0835 + 0.1632, abs=2e-3)  # their Chinchilla


def test_parameters_that_the_data_do_not_determine_are_named():
    flat = points_from(Law(2.0, 0.0, 3000.0, 0.3, 0.55))  # the size has no effect
    assert "A" in fit(flat).bounds
    steep = points_from(Law(2.0, 1e17, 3000.0, 3.0, 0.55))
    law = fit(steep)
    assert law.alpha == pytest.approx(EXPONENTS[1]) and "alpha" in law.bounds


def test_points_are_the_finished_variants(tmp_path):
    sweep = law_sweep(tmp_path, **{"3x96_400": "failed", "5x224_100": math.nan})
    points = points_of(sweep, "parameters_without_embeddings")
    assert len(points) == 18
    assert not {"shape=3x96, steps=400", "shape=5x224, steps=100"} & set(points.labels)
    assert points.parameters.tolist() == sorted(points.parameters) and set(points.parameters) == set(SIZES.values())
    np.testing.assert_allclose(points.loss, HOFFMANN.loss(points.parameters, points.tokens))
    assert set(points_of(sweep, "parameters").parameters) == {2 * size for size in SIZES.values()}


def test_losses_are_averaged_over_seeds(tmp_path):
    losses = {(n, d): {0: 3.0, 1: 3.2, 2: "failed"} if n == 1 else {1: 2.5} for n in (1, 2, 3, 4) for d in (10, 20, 30)}
    more = {(n, d): {"parameters": n, "tokens": d} for n, d in losses}
    points = points_of(read_sweep(write_sweep(tmp_path, ["a.n", "a.d"], losses, summary=more)), "parameters")
    np.testing.assert_allclose(points.by_seed, [[3.0, 3.2]] * 3 + [[math.nan, 2.5]] * 9)
    assert points.loss.tolist() == [pytest.approx(3.1)] * 3 + [2.5] * 9
    assert points.seeds.tolist() == [2] * 3 + [1] * 9
    assert points.spread[0] == pytest.approx(math.sqrt(0.02)) and math.isnan(points.spread[3])


@pytest.mark.parametrize(
    "states, summary, message",
    [
        ({f"5x224_{steps}": "unfinished" for steps in STEPS}, {}, "3 of at least 4 sizes; train more"),
        (
            {f"{shape}_{steps}": "failed" for shape in SIZES for steps in list(STEPS)[2:]},
            {},
            "2 of at least 3 token counts; train more",
        ),
        (
            {f"{shape}_{steps}": "failed" for shape in SIZES for steps in STEPS},
            {},
            "0 of at least 4 sizes, 0 of at least 3 token counts, 0 of at least 6 points; train more",
        ),
        ({}, {("4x160", 160): {"data_fingerprint": "another"}}, "several texts"),
        (
            {},
            {("4x160", 160): {"tokens": STEPS[100]}},
            "shape=4x160, steps=100 and shape=4x160, steps=160 have the same parameters",
        ),
    ],
)
def test_unusable_sweeps_are_refused(states, summary, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        points_of(law_sweep(tmp_path, summary=summary, **states), "parameters_without_embeddings")


def test_too_few_points_of_enough_sizes_and_counts():
    points = points_from(HOFFMANN, tokens=(1e5, 2e5, 4e5))
    few = points.take([0, 4, 8, 9])
    assert few.shortfall(MIN_FIT) == few.shortfall(MIN_HELD_OUT) == ["4 of at least 6 points"]
    assert points.shortfall(MIN_FIT) == []
    assert points.take([0, 0, 1, 1, 2, 3, 4, 5]).shortfall(MIN_HELD_OUT) == ["2 of at least 3 sizes"]


def test_a_law_needs_five_token_counts_and_two_seeds_at_every_point():
    points = points_from(HOFFMANN)
    assert points.shortfall(MIN_LAW) == ["1 of at least 2 seeds at every point"]
    twice = np.stack([points.loss, points.loss], 1)
    assert replace(points, by_seed=twice).shortfall(MIN_LAW) == []
    twice[7, 1] = math.nan
    four = replace(points, by_seed=twice).take(points.tokens > min(points.tokens))
    assert four.shortfall(MIN_LAW) == ["4 of at least 5 token counts", "1 of at least 2 seeds at every point"]


@pytest.mark.parametrize("resamples", [[], LAWS[1:3]], ids=["no interval", "interval"])
def test_picture(resamples, drawn, tmp_path):
    points = points_from(LAWS[1])
    wrong = points.with_loss(points.loss + 0.01)
    plot_law(tmp_path / "law.png", wrong, LAWS[1], resamples)
    left, below, right = drawn["law.png"].axes
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["0.0983 M", "0.332 M", "1.23 M", "3.01 M"]
    assert len(right.collections) == bool(resamples)
    for i, size in enumerate(SIZES.values()):
        x, y = left.lines[3 * i].get_data()
        np.testing.assert_allclose(np.stack([x, y]), np.stack([list(STEPS.values()), LAWS[1].loss(size, x) + 0.01]))
        for line in below.lines[2 * i : 2 * i + 2]:
            np.testing.assert_allclose(line.get_ydata().ravel(), 0.01)
