"""The fit of a law: against laws that are known. `test_published` has the section of a report."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t

from tests.calls import call
from tests.conftest import assert_refused
from tests.scripts.experiments.synthetic import write_sweep
from tril.scripts.experiments.scaling import Law, Points, fit, held_out_errors, resample
from tril.scripts.report import main

SIZES = {"2x64": 98_304, "3x96": 331_776, "4x160": 1_228_800, "5x224": 3_010_560}  # of +ablation=scaling
STEPS = {60: 122_880, 100: 204_800, 160: 327_680, 250: 512_000, 400: 819_200}  # -> tokens
HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)  # Hoffmann et al., equation 10
NAMES = ("E", "A", "B", "alpha", "beta")


def points(law: Law, steps=STEPS, noise: float = 0.0) -> Points:
    """Every size with every number of tokens, with normal noise on log L."""
    n, d = (axis.ravel().astype(float) for axis in np.meshgrid([*SIZES.values()], [*steps.values()], indexing="ij"))
    loss = law.loss(n, d) * np.exp(noise * np.random.default_rng(0).normal(size=len(n)))
    return Points(n, d, loss, np.ones(len(n)), 0.0)


def test_a_law_is_found_from_its_losses_also_with_an_outlier():
    for law in (HOFFMANN, Law(3.0, 1e4, 1e5, 0.7, 0.8)):
        found = fit(exact := points(law))
        assert [getattr(found, name) for name in NAMES] == pytest.approx([getattr(law, x) for x in NAMES], rel=1e-3)
        assert not found.bounds and all(error < 1e-4 for error in held_out_errors(exact).values())
    exact = points(HOFFMANN)
    loss = exact.loss.copy()
    loss[7] *= 1.2
    found = fit(replace(exact, loss=loss))  # it counts less than by least squares
    assert found.loss(exact.parameters, exact.tokens) == pytest.approx(exact.loss, rel=0.01)


def test_the_best_split_is_the_minimum_along_equal_compute():
    n, d = HOFFMANN.optimum(1e18)
    assert 6 * n * d == pytest.approx(1e18)
    assert HOFFMANN.loss(n, d) < min(HOFFMANN.loss(n * factor, d / factor) for factor in (0.9, 1.1))


@pytest.mark.slow
def test_intervals_are_those_of_linear_regression_where_the_noise_is_small():
    """12 points leave 7 degrees of freedom. The prediction is one beyond the points."""
    noisy = points(HOFFMANN, dict([*STEPS.items()][::2]), noise=1e-5)
    law, at = fit(noisy), (3e7, 8e6)

    def gradient(n, d):  # of log L with respect to E, log A, log B, alpha, beta
        by_n, by_d = law.A / n**law.alpha, law.B / d**law.beta
        slopes = [np.ones_like(by_n), by_n, by_d, -by_n * np.log(n), -by_d * np.log(d)]
        return np.stack(slopes, -1) / law.loss(n, d)[..., None]

    design, direction = gradient(noisy.parameters, noisy.tokens), gradient(*map(np.float64, at))
    left = np.log(noisy.loss / law.loss(noisy.parameters, noisy.tokens))
    variance = left @ left / 7 * direction @ np.linalg.pinv(design.T @ design) @ direction
    predicted = np.log([each.loss(*at) for each in resample(noisy, law, 1200)])
    width = np.diff(np.quantile(predicted, [0.025, 0.975]))
    assert width == pytest.approx(2 * t.isf(0.025, 7) * variance**0.5, rel=0.08)  # 1200 draws


def test_a_sweep_that_determines_no_law_is_refused(tmp_path):
    for change, message in (
        ({"parameters_without_embeddings": 1000}, "has the size and tokens of another variant"),
        ({"diverged": "step 9"}, "0 of at least 4 sizes, 0 of at least 3 token counts; train more"),
    ):
        grid = [*itertools.product(SIZES, STEPS)]
        summary = {(n, d): {"parameters_without_embeddings": SIZES[n], "tokens": STEPS[d]} | change for n, d in grid}
        folder, keys = tmp_path / [*change][0], ["model.shape", "trainer.steps"]
        write_sweep(folder, dict.fromkeys(grid, {0: 3.0}), keys, baseline=("", 0), summary=summary)
        assert_refused(call(main, f"dir={folder}", "fit=scaling", "out=out", cwd=tmp_path), message)
