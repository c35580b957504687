"""The picture of a comparison, the sentence about it, and when it ends."""

import math
import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from tril.model.comparison import Bound, Comparison, compare
from tril.model.intervals import Interval
from tril.scripts.experiments.losses import Losses
from tril.scripts.trials.decision import Decision, Rules, conclude
from tril.scripts.trials.referee_page import plot_looks, sentence

DIFFERENCES = np.array([-0.4, -0.6, -0.5, -0.45, -0.55])


def decision(verdict="better", reason=""):
    losses = np.stack([np.full(5, 3.0), 3.0 + DIFFERENCES])[..., None]
    looks = [compare(losses[:, :n], np.ones(1), bound=Bound.EVERY_LOOK)[0] for n in range(1, 6)]
    return Decision(verdict, reason, looks, [60.0] * 5, Losses(losses, np.ones(1), "nats per token", "the whole text"))


def test_picture_shows_pairs_interval_margin_and_time(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures.append(figure))
    plot_looks(tmp_path / "interval.png", decision(), margin=0.1)
    [axes] = figures[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["difference of one pair"].get_xydata(), np.c_[range(1, 6), DIFFERENCES])
    [bars] = axes.containers
    ends = [segment[:, 1].tolist() for segment in bars.lines[2][0].get_segments()]
    expected = [[look.difference.low, look.difference.high] for look in decision().looks[2:]]
    np.testing.assert_allclose(ends, expected)
    [minutes] = axes.child_axes
    figures[0].draw_without_rendering()
    np.testing.assert_allclose(minutes.get_xlim(), axes.get_xlim())  # a pair takes a minute
    assert axes.patches[0].get_xy()[1] == -0.1 and axes.patches[0].get_height() == pytest.approx(0.2)


def test_sentence():
    interval = decision().looks[-1].difference
    words = f"-0.5000 (95% interval {interval.low:.4f} to {interval.high:.4f}) nats per token"
    assert sentence(decision()) == f"better: candidate - baseline = {words}, after 5 pairs of runs in 00:05:00."
    diverged = Decision("worse", "It diverged.", [], [60.0], None)
    assert sentence(diverged) == "worse after 1 pair of runs in 00:01:00 (It diverged.)"


def look(n, verdict="not distinguishable"):
    return Comparison(Interval(-0.1, -0.6, 0.4, n), verdict, n, 0.1, 5.0)


@pytest.mark.parametrize(
    ("found", "seconds", "verdict", "reason"),
    [
        (look(5, "better"), 60.0, "better", ""),
        (look(5, "equal within the margin"), 60.0, "equal", ""),
        (look(5), 60.0, None, ""),
        (look(20), 60.0, "undecided", r"20 pairs of runs did not settle it. 20 pairs find a difference of 0\.\d+\.$"),
        (
            look(5),
            400.0,
            "undecided",
            "Another pair of about 00:06:40 would exceed the budget of 00:33:20. 5 pairs find",
        ),
        (look(5), 333.3, None, ""),
        (Comparison(Interval(-0.1, None, None, 1), "one seed", 1), 60.0, None, ""),
    ],
)
def test_conclusion(found, seconds, verdict, reason):
    ended = conclude(found, [seconds] * found.seeds, Rules(margin=0.01, seconds=2000.0, pairs=20))
    assert ended[0] == verdict and re.search(reason, ended[1]) and bool(reason) == bool(ended[1])


def test_the_hundredth_pair_is_the_last():
    ended = conclude(look(100), [1.0] * 100, Rules(0.01, math.inf, 500))
    assert ended[0] == "undecided" and "the error rate holds for 100 pairs" in ended[1]
