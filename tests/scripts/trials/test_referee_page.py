"""The picture of a comparison and the sentence about it."""

import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from tril.scripts.trials.decision import Decision, Rules, conclude
from tril.scripts.trials.paired_losses import PairedLosses
from tril.scripts.trials.referee_page import plot_looks, sentence
from tril.scripts.trials.sequential import Look

DIFFERENCES = np.array([-0.4, -0.6, -0.5, -0.45, -0.55])


def decision(verdict="better", reason=""):
    looks = [Look.at(DIFFERENCES[:n]) for n in range(1, 6)]
    losses = PairedLosses(np.full(5, 3.0), 3.0 + DIFFERENCES, "nats per token", None)
    return Decision(verdict, reason, looks, [60.0] * 5, losses)


def test_picture_shows_pairs_interval_margin_and_time(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    plot_looks(tmp_path / "interval.png", decision(), margin=0.1)
    [axes] = figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["difference of one pair"].get_xydata(), np.c_[range(1, 6), DIFFERENCES])
    [bars] = axes.containers
    ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    expected = [[look.low, look.high] for look in decision().looks if math.isfinite(look.half)]
    assert len(expected) == 3
    np.testing.assert_allclose(ends, expected)
    [minutes] = axes.child_axes
    figures[0].draw_without_rendering()
    np.testing.assert_allclose(minutes.get_xlim(), axes.get_xlim())  # a pair takes a minute
    assert axes.patches[0].get_xy()[1] == -0.1 and axes.patches[0].get_height() == pytest.approx(0.2)


def test_sentence():
    look = decision().looks[-1]
    interval = f"-0.5000 (95% interval {look.low:.4f} to {look.high:.4f}) nats per token"
    assert sentence(decision()) == f"better: candidate - baseline = {interval}, after 5 pairs of runs in 00:05:00."
    assert sentence(Decision("worse", "It diverged.", [], [60.0], None)) == (
        "worse after 1 pair of runs in 00:01:00 (It diverged.)"
    )
    early = Decision("undecided", "Reason.", decision().looks[:1], [60.0], decision().losses)
    assert sentence(early) == (
        "undecided: candidate - baseline = -0.4000 (no interval yet) nats per token, after 1 pair of runs in 00:01:00. "
        "Reason."
    )


@pytest.mark.parametrize(
    ("look", "verdict", "reason"),
    [
        (Look(5, -1.0, 0.1, 0.2, 0.3), "better", ""),
        (Look(5, -0.1, 0.1, 0.2, 0.0), None, ""),
        # the interval over texts of any mean from 0 to -0.2 is +-0.5; at 25 times the text it is +-0.1
        (
            Look(5, -0.1, 0.1, 0.1, 0.5),
            "undecided",
            "alone leaves an uncertainty of ± 0.5000, .* about 25 times as much",
        ),
        (
            Look(20, -0.25, 0.5, 0.3, 0.0),
            "undecided",
            r"20 pairs of runs did not settle it. It would take about 25 more pairs \(00:25:00 of training\)",
        ),
        (Look(20, -0.01, 9.0, 5.0, 0.0), "undecided", "did not settle it. More than 100 pairs would be needed if mean"),
        (Look(20, -0.1, 0.5, 0.5, 0.4), "undecided", "did not settle it. The choice of the validation text alone"),
        (Look(2, -0.1, 0.5, math.inf, 0.4), None, ""),
    ],
)
def test_conclusion(look, verdict, reason):
    found = conclude(look, [60.0] * look.n, Rules(margin=0.01, seconds=2000.0, pairs=20, text="random"))
    assert found[0] == verdict and re.search(reason, found[1]) and bool(reason) == bool(found[1])


def test_the_hundredth_pair_is_the_last():
    found = conclude(Look(100, 0.0, 1.0, 0.5, 0.0), [1.0] * 100, Rules(0.01, 1e9, 500, "fixed"))
    assert found[0] == "undecided" and "the error rate holds for 100 pairs" in found[1]


def test_budget():
    rules = Rules(0.01, 100.0, 100, "fixed")
    look = Look(4, 0.0, 1.0, 0.5, 0.0)
    assert conclude(look, [20.0] * 4, rules) == (None, "")
    assert conclude(look, [20.1] * 4, rules)[1].startswith(
        "Another pair of about 00:00:20 would exceed the budget of 00:01:40. "
    )
