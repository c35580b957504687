"""The scaling law: parameters are recovered from the losses of a law; unusable sweeps are refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize_scalar
from scipy.stats import t as student

from tests.scripts.ablation.synthetic import write_sweep
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.scaling_law import (
    DELTA,
    EXPONENTS,
    MIN_FIT,
    MIN_HELD_OUT,
    Law,
    Points,
    fit,
    jacobian,
    percentile_interval,
    points_of,
    predict_held_out,
    prediction_errors,
    resample,
    residuals,
)
from tril.scripts.ablation.scaling_plots import plot_law

SIZES = {"3x96": 331_776, "4x144": 995_328, "5x240": 3_456_000, "6x384": 10_616_832}
STEPS = {100: 204_800, 225: 460_800, 500: 1_024_000}  # -> tokens
TOKENS = tuple(STEPS.values())
HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)  # Hoffmann et al., equation 10
SIX = [0, 1, 2, 5, 8, 11]  # of the twelve: the smallest size at every length, every size at the longest
LAWS = [HOFFMANN, Law(2.0, 50.0, 3000.0, 0.3, 0.55), Law(0.5, 20.0, 900.0, 0.2, 0.4), Law(3.0, 1e4, 1e5, 0.7, 0.8)]


def points_from(law: Law, tokens=TOKENS) -> Points:
    n, d = (axis.ravel() for axis in np.meshgrid([float(size) for size in SIZES.values()], tokens, indexing="ij"))
    return Points(tuple(map(str, range(len(n)))), n, d, law.loss(n, d), np.ones(len(n)), np.full(len(n), math.nan))


def assert_same(law: Law, true: Law, rel: float) -> None:
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(law, name) == pytest.approx(getattr(true, name), rel=rel), name


def law_sweep(folder, law=HOFFMANN, summary=None, **states):
    """The sweep of +ablation=scaling with the losses of a law; states: "3x96_100" -> loss or state of seed 0."""
    losses, more = {}, {}
    for shape, n in SIZES.items():
        for steps, d in STEPS.items():
            losses[shape, steps] = {0: states.get(f"{shape}_{steps}", float(law.loss(n, d)))}
            own = (summary or {}).get((shape, steps), {})
            more[shape, steps] = {"parameters_without_embeddings": n, "parameters": 2 * n, "tokens": d} | own
    return read_sweep(write_sweep(folder, ["shape", "steps"], losses, summary=more))


@pytest.mark.parametrize("true", [*LAWS[:2], *(pytest.param(law, marks=pytest.mark.slow) for law in LAWS[2:])], ids=str)
def test_law_is_recovered_from_its_losses(true):
    law = fit(points_from(true))
    assert_same(law, true, rel=1e-6)
    assert law.bounds == ()


@pytest.mark.parametrize("outlier", [0, 5, 11])
def test_one_outlier_moves_the_law_little(outlier):
    """An outlier of a tenth of the loss. Least squares of log L would be off by per cents everywhere."""
    points = points_from(LAWS[1])
    wrong = points.loss.copy()
    wrong[outlier] *= 1.1
    law, others = fit(replace(points, loss=wrong)), np.arange(len(points)) != outlier
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


def test_held_out_points_of_an_exact_law_are_predicted_exactly():
    points = points_from(LAWS[1])
    found = predict_held_out(points)
    np.testing.assert_allclose(found["one point"], points.loss, rtol=1e-5)
    largest = points.parameters == max(SIZES.values())
    np.testing.assert_allclose(found["largest size"][largest], points.loss[largest], rtol=1e-5)
    assert np.isnan(found["largest size"][~largest]).all()
    assert np.isnan(found["longest runs"]).all()  # two token counts are left, which determine no beta


def test_held_out_points_do_not_influence_their_prediction():
    points = points_from(LAWS[1])
    largest = points.parameters == max(SIZES.values())
    found = predict_held_out(
        replace(points, loss=points.loss + 0.3 * (np.arange(12) == 10))
    )  # an outlier of the largest size
    assert found["one point"][10] == pytest.approx(points.loss[10], rel=1e-5)
    np.testing.assert_allclose(found["largest size"][largest], points.loss[largest], rtol=1e-5)
    four = points_from(LAWS[1], tokens=(91_022, *STEPS.values()))
    longest = four.tokens == max(STEPS.values())
    hidden = predict_held_out(replace(four, loss=np.where(longest, 9.0, four.loss)))["longest runs"]
    np.testing.assert_allclose(hidden[longest], four.loss[longest], rtol=1e-5)


def test_prediction_errors_by_hand():
    found = prediction_errors(np.array([2.0, 4.0, 5.0]), np.array([2.1, 3.6, math.nan]))
    assert found == pytest.approx({"points": 2, "mean": 0.25, "largest": 0.4, "bias": -0.15, "relative": 0.075})
    assert prediction_errors(np.ones(2), np.full(2, math.nan)) is None


def noisy(points: Points, spread: float, seed: int) -> Points:
    return replace(points, loss=points.loss * np.exp(spread * np.random.default_rng(seed).normal(size=len(points))))


def test_resamples_enclose_the_law_and_depend_on_the_seed():
    true = LAWS[1]
    points = noisy(points_from(true), 0.002, seed=3)
    law = fit(points)
    laws = resample(points, law, 20, seed=1)
    low, high = percentile_interval([law.beta for law in laws])
    assert low < true.beta < high and high - low < 0.2
    assert resample(points, law, 2, seed=1) == laws[:2] != resample(points, law, 2, seed=2)
    assert len(set(laws)) > 10


@pytest.mark.parametrize("rows", [SIX, range(12)], ids=len)
def test_the_noise_of_resamples_is_students_t_of_the_residuals(rows, monkeypatch):
    """As in a linear model, where the intervals are then exact."""
    true, points = LAWS[1], noisy(points_from(LAWS[1]).take(rows), 0.005, seed=0)
    fitted = true.loss(points.parameters, points.tokens)
    monkeypatch.setattr("tril.scripts.ablation.scaling_law.fit", lambda copy, **options: copy.loss)
    noise = np.log(np.array(resample(points, true, 20_000, seed=0)) / fitted)
    scale = math.sqrt((np.log(points.loss / fitted) ** 2).sum() / (len(points) - 5))
    for level in (0.5, 0.95):
        width = student.ppf((1 + level) / 2, len(points) - 5) * scale
        assert np.quantile(np.abs(noise), level, axis=0) == pytest.approx(width, rel=0.1)
    assert np.abs(noise).max() < 3.001  # one degree of freedom alone has no bounds


@pytest.mark.parametrize("n, least", [(1, 1), pytest.param(12, 9, marks=pytest.mark.slow)])
def test_intervals_from_six_points_contain_the_truth(n, least):
    """The loss between the points and one far beyond them. Resamples of the points would all be the same six."""
    true, held = LAWS[1], {(2e6, 4e5): 0, (1e8, 1e7): 0}
    for seed in range(n):
        points = noisy(points_from(true).take(SIX), 0.005, seed)
        laws = resample(points, fit(points), 20, seed)
        for at in held:
            low, high = percentile_interval([law.loss(*at) for law in laws])
            held[at] += low <= true.loss(*at) <= high
    assert min(held.values()) >= least, held


def test_percentile_interval_is_the_middle_of_the_values():
    assert percentile_interval(range(101)) == pytest.approx((2.5, 97.5))


def test_points_are_the_finished_variants(tmp_path):
    sweep = law_sweep(tmp_path, **{"3x96_500": "failed", "5x240_100": math.nan})
    points = points_of(sweep, "parameters_without_embeddings")
    assert (
        len(points) == 10
        and "shape=3x96, steps=500" not in points.labels
        and "shape=5x240, steps=100" not in points.labels
    )
    assert points.parameters.tolist() == sorted(points.parameters) and set(points.parameters) == set(SIZES.values())
    np.testing.assert_allclose(points.loss, HOFFMANN.loss(points.parameters, points.tokens))
    assert set(points_of(sweep, "parameters").parameters) == {2 * size for size in SIZES.values()}


def test_losses_are_averaged_over_seeds(tmp_path):
    losses = {(n, d): {0: 3.0, 1: 3.2, 2: "failed"} if n == 1 else {0: 2.5} for n in (1, 2, 3, 4) for d in (10, 20, 30)}
    more = {(n, d): {"parameters": n, "tokens": d} for n, d in losses}
    points = points_of(read_sweep(write_sweep(tmp_path, ["a.n", "a.d"], losses, summary=more)), "parameters")
    assert points.loss.tolist() == [pytest.approx(3.1)] * 3 + [2.5] * 9
    assert points.seeds.tolist() == [2] * 3 + [1] * 9
    assert points.spread[0] == pytest.approx(math.sqrt(0.02)) and math.isnan(points.spread[3])


@pytest.mark.parametrize(
    "states, summary, message",
    [
        ({f"6x384_{steps}": "unfinished" for steps in STEPS}, {}, "3 sizes of at least 4"),
        ({f"{shape}_500": "failed" for shape in SIZES}, {}, "2 token counts of at least 3"),
        (
            {f"{shape}_{steps}": "failed" for shape in SIZES for steps in STEPS},
            {},
            "0 sizes of at least 4, 0 token counts of at least 3",
        ),
        ({}, {("4x144", 225): {"data_fingerprint": "another"}}, "several texts"),
        (
            {},
            {("4x144", 225): {"tokens": 204_800}},
            "shape=4x144, steps=100 and shape=4x144, steps=225 have the same parameters",
        ),
    ],
)
def test_unusable_sweeps_are_refused(states, summary, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        points_of(law_sweep(tmp_path, summary=summary, **states), "parameters_without_embeddings")


def test_too_few_points_of_enough_sizes_and_counts():
    points = points_from(HOFFMANN).take([0, 4, 8, 9])
    assert points.shortfall(MIN_FIT) == points.shortfall(MIN_HELD_OUT) == "4 points of at least 6"
    assert points_from(HOFFMANN).shortfall(MIN_FIT) == ""
    assert points_from(HOFFMANN).take([0, 0, 1, 1, 2, 3, 4, 5]).shortfall(MIN_HELD_OUT) == "2 sizes of at least 3"


def test_picture_is_written(tmp_path):
    points = points_from(LAWS[1])
    plot_law(tmp_path / "law.png", points, LAWS[1], LAWS[1:])
    assert (tmp_path / "law.png").read_bytes()[1:4] == b"PNG"
