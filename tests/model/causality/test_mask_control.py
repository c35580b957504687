"""The comparison of a run with and without mask: curves from a run's log, the page and the plot."""

import math

import pytest

from tril.model.causality.mask_control import SIDES, page, plot, read_curves
from tril.model.intervals import Interval


def log(folder, version, lines):
    path = folder / "csv" / f"version_{version}" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(["lr,step,train/loss,val/loss", *lines]) + "\n")


def estimate(mean, half_width):
    return Interval(mean, mean - half_width, mean + half_width, 12)


def two_sides():
    def side(train, one_pass, prefix_only, gap):
        curves = {"train": [(10, 4.0), (20, train)], "val": [(20, 3.5)]}
        samples = [["def ", "f(x):\n\n    pass"], ["a", "b"]]
        losses = {"one_pass": one_pass, "prefix_only": prefix_only, "gap": gap}
        return {"parameters": 1234, "curves": curves, "samples": samples} | losses

    masked = side(2.0, estimate(3.0, 0.1), estimate(3.0, 0.1), estimate(-1e-9, 1e-9))
    return {"masked": masked, "unmasked": side(0.1, estimate(0.5, 0.1), estimate(9.0, 0.2), estimate(8.5, 0.3))}


def test_of_a_resumed_run_the_newer_rows_count(tmp_path):
    log(tmp_path, 2, ["0.1,10,5.0,", "0.1,20,4.0,", "0.1,19,,4.5", "0.1,30,9.0,"])
    log(tmp_path, 10, ["0.1,30,3.0,", "0.1,40,2.0,", "0.1,39,,2.5"])
    curves = read_curves(tmp_path)
    assert curves == {"train": [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)], "val": [(19, 4.5), (39, 2.5)]}


def test_runs_without_curves_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no csv/version_.*; name the folder of a run"):
        read_curves(tmp_path)
    log(tmp_path, 0, ["0.1,10,5.0,"])
    with pytest.raises(ValueError, match="has no val/loss"):
        read_curves(tmp_path)


def test_the_page_has_remark_table_plot_and_both_texts_of_every_prompt():
    sides = two_sides()
    sides["unmasked"]["samples"] = [["def ", "```"], ["a", "c"]]
    assert page(sides, "THE TABLE", "A remark.").startswith(
        "# With and without the causal mask\n\nA remark.\n\nTHE TABLE\n\n![Losses of both runs](control.png)\n\n"
        "## Continuations of `'def '`\n\nmasked:\n\n    def f(x):\n    \n        pass\n\nunmasked:\n\n    def ```\n\n"
        "## Continuations of `'a'`"
    )


def test_the_plot_shows_both_curves_four_losses_and_the_uniform_guess(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    sides, figures, save = two_sides(), [], Figure.savefig

    def savefig(self, *args, **kwargs):
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", savefig)
    plot(tmp_path / "a.png", sides, math.log(4096))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    left, right = figures[0].axes
    for name, line in zip(SIDES, left.lines, strict=False):
        assert line.get_label() == name
        assert list(zip(*line.get_data(), strict=True)) == sides[name]["curves"]["train"]
    labels = [label.get_text() for label in right.get_xticklabels()]
    heights = dict(zip(labels, [bar.get_height() for bar in right.patches], strict=True))
    assert heights == {
        "masked,\none pass": 3.0,
        "masked,\nprefix only": 3.0,
        "unmasked,\none pass": 0.5,
        "unmasked,\nprefix only": 9.0,
    }
    ends = [segment[:, 1].tolist() for segment in right.collections[0].get_segments()]
    assert ends == [pytest.approx(limits) for limits in ([2.9, 3.1], [2.9, 3.1], [0.4, 0.6], [8.8, 9.2])]
    for axes in (left, right):
        assert list(axes.lines[-1].get_ydata()) == [math.log(4096)] * 2
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > math.log(4096)
