"""The scaling law: literal parameters come back from losses made of them; what cannot be fitted is refused."""

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
    IDENTIFIED,
    NEEDED,
    Cells,
    Law,
    cells_of,
    errors,
    fit,
    held_out,
    interval,
    resampled,
    residuals,
    slopes,
)
from tril.scripts.ablation.scaling_plots import plot

SIZES = {"3x96": 331_776, "4x144": 995_328, "5x240": 3_456_000, "6x384": 10_616_832}
STEPS = {100: 204_800, 225: 460_800, 500: 1_024_000}  # -> tokens
HOFFMANN = Law(1.69, 406.4, 410.7, 0.34, 0.28)  # their equation 10
SIX = [0, 1, 2, 5, 8, 11]  # of the twelve: the smallest size at every length, every size at the longest
LAWS = [HOFFMANN, Law(2.0, 50.0, 3000.0, 0.3, 0.55), Law(0.5, 20.0, 900.0, 0.2, 0.4), Law(3.0, 1e4, 1e5, 0.7, 0.8)]


def cells_from(law: Law, tokens=tuple(STEPS.values())) -> Cells:
    n, d = (axis.ravel() for axis in np.meshgrid([float(size) for size in SIZES.values()], tokens, indexing="ij"))
    return Cells(tuple(map(str, range(len(n)))), n, d, law.loss(n, d), np.ones(len(n)), np.full(len(n), math.nan))


def assert_same(law: Law, true: Law, rel: float) -> None:
    for name in ("E", "A", "B", "alpha", "beta"):
        assert getattr(law, name) == pytest.approx(getattr(true, name), rel=rel), name


def sweep_of(folder, law=HOFFMANN, summary=None, **states):
    """The sweep of the ready grid whose losses are those of a law; states: of cells, "3x96_100" -> loss or state of seed 0."""
    losses, more = {}, {}
    for shape, n in SIZES.items():
        for steps, d in STEPS.items():
            losses[shape, steps] = {0: states.get(f"{shape}_{steps}", float(law.loss(n, d)))}
            own = (summary or {}).get((shape, steps), {})
            more[shape, steps] = {"parameters_without_embeddings": n, "parameters": 2 * n, "tokens": d} | own
    return read_sweep(write_sweep(folder, ["shape", "steps"], losses, summary=more))


@pytest.mark.parametrize("true", LAWS, ids=str)
def test_the_law_comes_back_from_its_own_losses(true):
    law = fit(cells_from(true))
    assert_same(law, true, rel=1e-6)
    assert law.bounds == ()


@pytest.mark.parametrize("place", [0, 5, 11])
def test_one_cell_that_went_wrong_moves_it_little(place):
    """By a tenth of its loss. Least squares of log L would be off by per cents of the loss all over; Huber's loss is bounded."""
    cells = cells_from(LAWS[1])
    wrong = cells.loss.copy()
    wrong[place] *= 1.1
    law, others = fit(replace(cells, loss=wrong)), np.arange(len(cells)) != place
    np.testing.assert_allclose(law.loss(cells.parameters, cells.tokens)[others], cells.loss[others], rtol=DELTA)


def test_residuals_are_those_of_the_law_and_their_slopes_those_of_differences():
    cells = cells_from(LAWS[1])
    n, d = np.log(cells.parameters / 2e6), np.log(cells.tokens / 6e5)
    theta = np.array([math.log(2.0), math.log(0.6), math.log(1.9), 0.3, 0.55])
    data = n, d, np.log(cells.loss)
    fitted = 2.0 + 0.6 * np.exp(-0.3 * n) + 1.9 * np.exp(-0.55 * d)
    np.testing.assert_allclose(residuals(theta, *data), np.log(fitted / cells.loss), rtol=1e-12)
    differences = approx_fprime(theta, lambda at: residuals(at, *data), 1e-7)  # (n, 5)
    np.testing.assert_allclose(slopes(theta, *data), differences, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("flops", [1e14, 1e20])
def test_the_best_split_is_the_minimum_found_by_search(law, flops):
    def loss(log_n):
        return float(law.loss(np.exp(log_n), flops / 6 / np.exp(log_n)))

    found = minimize_scalar(loss, bounds=(2, 40), options={"xatol": 1e-9})
    n, d = law.optimum(flops)
    assert 6 * n * d == pytest.approx(flops, rel=1e-12)
    assert math.log(n) == pytest.approx(found.x, abs=1e-3)
    assert law.loss(n, d) == pytest.approx(found.fun, rel=1e-12)


def test_hoffmanns_own_figures():
    """Their appendix D.3: with alpha = 0.34 and beta = 0.28, N grows with compute to the power of 0.46 (0.452 from the rounded ones)."""
    (small, _), (large, _) = HOFFMANN.optimum(1e20), HOFFMANN.optimum(1e21)
    assert math.log10(large / small) == pytest.approx(0.28 / 0.62, rel=1e-9)
    assert HOFFMANN.loss(70e9, 1.4e12) == pytest.approx(1.69 + 0.0835 + 0.1632, abs=2e-3)  # their Chinchilla


def test_what_the_data_do_not_determine_is_named():
    flat = cells_from(Law(2.0, 0.0, 3000.0, 0.3, 0.55))  # the size has no effect
    assert "A" in fit(flat).bounds
    steep = cells_from(Law(2.0, 1e17, 3000.0, 3.0, 0.55))
    law = fit(steep)
    assert law.alpha == pytest.approx(EXPONENTS[1]) and "alpha" in law.bounds


def test_held_out_cells_of_an_exact_law_are_predicted_exactly():
    cells = cells_from(LAWS[1])
    found = held_out(cells)
    np.testing.assert_allclose(found["one cell"], cells.loss, rtol=1e-5)
    largest = cells.parameters == max(SIZES.values())
    np.testing.assert_allclose(found["largest size"][largest], cells.loss[largest], rtol=1e-5)
    assert np.isnan(found["largest size"][~largest]).all()
    assert np.isnan(found["longest runs"]).all()  # two token counts are left, which determine no beta


def test_a_cell_has_no_part_in_its_own_prediction():
    cells = cells_from(LAWS[1])
    largest = cells.parameters == max(SIZES.values())
    found = held_out(
        replace(cells, loss=cells.loss + 0.3 * (np.arange(12) == 10))
    )  # one of the largest size went wrong
    assert found["one cell"][10] == pytest.approx(cells.loss[10], rel=1e-5)
    np.testing.assert_allclose(found["largest size"][largest], cells.loss[largest], rtol=1e-5)
    four = cells_from(LAWS[1], tokens=(91_022, *STEPS.values()))
    longest = four.tokens == max(STEPS.values())
    hidden = held_out(replace(four, loss=np.where(longest, 9.0, four.loss)))["longest runs"]
    np.testing.assert_allclose(hidden[longest], four.loss[longest], rtol=1e-5)


def test_errors_by_hand():
    found = errors(np.array([2.0, 4.0, 5.0]), np.array([2.1, 3.6, math.nan]))
    assert found == pytest.approx({"cells": 2, "mean": 0.25, "largest": 0.4, "bias": -0.15, "relative": 0.075})
    assert errors(np.ones(2), np.full(2, math.nan)) is None


def noisy(cells: Cells, spread: float, seed: int) -> Cells:
    return replace(cells, loss=cells.loss * np.exp(spread * np.random.default_rng(seed).normal(size=len(cells))))


def test_resamples_enclose_the_law_and_follow_the_seed():
    true = LAWS[1]
    cells = noisy(cells_from(true), 0.002, seed=3)
    laws = resampled(cells, fit(cells), 40, seed=1)
    low, high = interval([law.beta for law in laws])
    assert low < true.beta < high and high - low < 0.2
    assert resampled(cells, fit(cells), 2, seed=1) == laws[:2] != resampled(cells, fit(cells), 2, seed=2)
    assert len(set(laws)) > 20


@pytest.mark.parametrize("rows", [SIX, range(12)], ids=len)
def test_the_noise_of_resamples_is_students_t_of_the_residuals(rows, monkeypatch):
    """As in a linear model, where that makes the intervals exact."""
    true, cells = LAWS[1], noisy(cells_from(LAWS[1]).take(rows), 0.005, seed=0)
    fitted = true.loss(cells.parameters, cells.tokens)
    monkeypatch.setattr("tril.scripts.ablation.scaling_law.fit", lambda copy, **options: copy.loss)
    noise = np.log(np.array(resampled(cells, true, 20_000, seed=0)) / fitted)
    scale = math.sqrt((np.log(cells.loss / fitted) ** 2).sum() / (len(cells) - 5))
    for level in (0.5, 0.95):
        width = student.ppf((1 + level) / 2, len(cells) - 5) * scale
        assert np.quantile(np.abs(noise), level, axis=0) == pytest.approx(width, rel=0.1)
    assert np.abs(noise).max() < 3.001  # one degree of freedom has no bounds by itself, floating point has


def test_intervals_from_six_cells_hold_the_truth():
    """Of the loss between the cells and of one far beyond them. Resamples of the cells themselves would all be these six, and none hold it."""
    true, held = LAWS[1], {(2e6, 4e5): 0, (1e8, 1e7): 0}
    for seed in range(12):
        cells = noisy(cells_from(true).take(SIX), 0.005, seed)
        laws = resampled(cells, fit(cells), 20, seed)
        for place in held:
            low, high = interval([law.loss(*place) for law in laws])
            held[place] += low <= true.loss(*place) <= high
    assert min(held.values()) >= 9, held  # of 12


def test_an_interval_is_the_middle_of_the_values():
    assert interval(range(101)) == pytest.approx((2.5, 97.5))


def test_cells_are_the_finished_variants(tmp_path):
    sweep = sweep_of(tmp_path, **{"3x96_500": "failed", "5x240_100": math.nan})
    cells = cells_of(sweep, "parameters_without_embeddings")
    assert (
        len(cells) == 10
        and "shape=3x96, steps=500" not in cells.labels
        and "shape=5x240, steps=100" not in cells.labels
    )
    assert cells.parameters.tolist() == sorted(cells.parameters) and set(cells.parameters) == set(SIZES.values())
    np.testing.assert_allclose(cells.loss, HOFFMANN.loss(cells.parameters, cells.tokens))
    assert set(cells_of(sweep, "parameters").parameters) == {2 * size for size in SIZES.values()}


def test_seeds_are_averaged(tmp_path):
    losses = {(n, d): {0: 3.0, 1: 3.2, 2: "failed"} if n == 1 else {0: 2.5} for n in (1, 2, 3, 4) for d in (10, 20, 30)}
    more = {(n, d): {"parameters": n, "tokens": d} for n, d in losses}
    cells = cells_of(read_sweep(write_sweep(tmp_path, ["a.n", "a.d"], losses, summary=more)), "parameters")
    assert cells.loss.tolist() == [pytest.approx(3.1)] * 3 + [2.5] * 9
    assert cells.seeds.tolist() == [2] * 3 + [1] * 9
    assert cells.spread[0] == pytest.approx(math.sqrt(0.02)) and math.isnan(cells.spread[3])


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
def test_what_no_law_can_be_fitted_to_is_refused(states, summary, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        cells_of(sweep_of(tmp_path, summary=summary, **states), "parameters_without_embeddings")


def test_too_few_cells_of_enough_sizes_and_counts():
    cells = cells_from(HOFFMANN).take([0, 4, 8, 9])
    assert cells.lacking(NEEDED) == cells.lacking(IDENTIFIED) == "4 cells of at least 6"
    assert cells_from(HOFFMANN).lacking(NEEDED) == ""
    assert cells_from(HOFFMANN).take([0, 0, 1, 1, 2, 3, 4, 5]).lacking(IDENTIFIED) == "2 sizes of at least 3"


def test_the_picture_is_written(tmp_path):
    cells = cells_from(LAWS[1])
    plot(tmp_path / "law.png", cells, LAWS[1], LAWS[1:])
    assert (tmp_path / "law.png").read_bytes()[1:4] == b"PNG"
