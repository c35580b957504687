"""The forest plot of a sweep's report: its rows and what is drawn of them."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from tests.scripts.ablation.synthetic import FOUR, HEADS, ONE, draw_all, sweep_of
from tril.model.intervals import Interval
from tril.scripts.ablation.difference_plots import Row, forest_rows, plot_differences
from tril.scripts.ablation.statistics import EQUAL, Comparison

BITS = "bits per byte"
COMPARISONS = {
    "a": Comparison(Interval(-0.05, -0.08, -0.02, 3), 0.001, "better", None, "", margin=0.03),
    "b": Comparison(Interval(0.25, 0.125, 0.375, 3), 0.01, "worse", None, "", unit=BITS),
    "c": Comparison(Interval(0.01, -0.02, 0.04, 3), 0.6, "not distinguishable", 4, "", margin=0.03),
    "d": Comparison(Interval(math.inf, None, None, 2), None, "diverged", None, "", margin=0.03),
    "e": Comparison(Interval(0.1, None, None, 1), None, "one seed", None, "", margin=0.03),
    "f": Comparison(Interval(0.005, -0.01, 0.02, 3), 0.9, EQUAL, None, "", margin=0.03),
}


def test_rows_are_the_differences_and_intervals_of_the_statistics():
    rows = forest_rows(COMPARISONS)
    assert list(rows) == ["nats per token", BITS]
    assert rows["nats per token"] == [
        Row("a", -0.05, -0.08, -0.02, "better", "-0.0500 ± 0.0300"),
        Row("c", 0.01, -0.02, 0.04, "not distinguishable", "+0.0100 ± 0.0300"),
        Row("e", 0.1, None, None, "one seed", "+0.1000 (one seed)"),
        Row("f", 0.005, -0.01, 0.02, EQUAL, "+0.0050 ± 0.0150"),
    ]
    assert rows[BITS] == [Row("b", 0.25, 0.125, 0.375, "worse", "+0.2500 ± 0.1250")]


def drawn_rows(axes):
    """(difference, row, ends of the bar, color, marker) of each marker."""
    found = []
    for container in axes.containers:
        marker, _, bars = container.lines
        ends = [segment[:, 0].tolist() for bar in bars for segment in bar.get_segments()]
        found.append((*marker.get_xydata()[0], ends, to_hex(marker.get_color()), marker.get_marker()))
    return found


def test_each_variant_is_a_marker_with_its_interval_at_its_place(tmp_path):
    [(figure, picture)] = plot_differences(sweep_of(tmp_path), "final", COMPARISONS)
    nats, bits = figure.axes[0], figure.axes[1]
    expected = [
        (-0.05, 2.5, [[-0.08, -0.02]], "#0072b2", "<"),
        (0.01, 5.0, [[-0.02, 0.04]], "#666666", "o"),
        (0.1, 7.5, [], "#666666", "o"),
        (0.005, 10.0, [[-0.01, 0.02]], "#009e73", "D"),
    ]
    for found, wanted in zip(drawn_rows(nats), expected, strict=True):
        assert found[:2] == pytest.approx(wanted[:2]) and found[3:] == wanted[3:]
        np.testing.assert_allclose(np.array(found[2]), np.array(wanted[2]))
    assert drawn_rows(bits) == [(0.25, 2.5, [[0.125, 0.375]], "#d55e00", ">")]
    for axes, unit in ((nats, "nats per token"), (bits, BITS)):
        assert axes.get_xlabel().splitlines()[0] == f"difference, {unit}"
        zero = [line for line in axes.lines if list(line.get_xdata()) == [0, 0]]
        low, high = axes.get_xlim()
        assert len(zero) == 1 and low < 0 < high
    assert nats.get_ylim()[0] > nats.get_ylim()[1]  # the first row at the top
    (band,) = nats.patches
    assert band.get_extents().transformed(nats.transData.inverted()).intervalx == pytest.approx([-0.03, 0.03])
    assert not bits.patches
    texts = [(text.get_text(), text.get_position()) for text in nats.texts]
    numbers = ["-0.0500 ± 0.0300", "+0.0100 ± 0.0300", "+0.1000 (one seed)", "+0.0050 ± 0.0150"]
    above = [2.5 * row - 0.5 for row in (1, 2, 3, 4)]  # the bars are 2.5 lines apart
    assert texts[::2] == [(name, (0, pytest.approx(y))) for name, y in zip("acef", above, strict=True)]
    assert texts[1::2] == [(number, (1, pytest.approx(y))) for number, y in zip(numbers, above, strict=True)]
    legend = [text.get_text() for text in figure.legends[0].texts]
    assert legend == ["better", "worse", EQUAL, "not distinguishable", "no verdict"]
    assert figure.get_suptitle() == "Differences of the final loss\nfrom n_heads=4 (zero line)"
    assert picture.file == "differences.png" and "corrected for 6 comparisons" in picture.caption


def test_a_report_draws_the_paired_difference(tmp_path, drawn):
    pictures = draw_all(sweep_of(tmp_path), tmp_path)
    assert pictures[0].file == "differences.png" and "corrected" not in pictures[0].caption  # one comparison
    ((mean, _, [(low, high)], _, _),) = drawn_rows(drawn["differences.png"].axes[0])
    differences = [one - four for one, four in zip(ONE, FOUR, strict=True)]
    half = 4.848732214 * np.std(differences, ddof=1) / math.sqrt(3)  # 98 % quantile of t with 2 degrees of freedom
    assert (mean, low, high) == pytest.approx((np.mean(differences), mean - half, mean + half))


def test_without_a_finite_difference_there_is_no_picture(tmp_path, drawn):
    draw_all(sweep_of(tmp_path, HEADS | {(1,): {0: 3.0, 1: math.nan}}), tmp_path)
    assert "differences.png" not in drawn and "final_loss.png" in drawn


def test_equal_losses_have_a_finite_axis(tmp_path):
    same = Comparison(Interval(0.0, 0.0, 0.0, 3), 1.0, "not distinguishable", None, "")
    [(figure, _)] = plot_differences(sweep_of(tmp_path), "final", {"a": same})
    assert figure.axes[0].get_xlim() == (-0.01, 0.01)
