"""What the control shows: curves read from a run's log, the table, the page and the picture."""

import math

import pytest

from tril.model.causality.mask_control import SIDES, page, plot, read_curves, table
from tril.model.causality.prefix_loss import Estimate

TABLE = """\
| nats per token                        |          masked |        unmasked |
|---------------------------------------|----------------:|----------------:|
| parameters                            |           1,234 |           1,234 |
| training loss, last logged            |          2.0000 |          0.1000 |
| validation loss, as the run logged it |          3.5000 |          3.5000 |
| loss in one pass                      | 3.0000 ± 0.1000 | 0.5000 ± 0.1000 |
| loss from the prefix alone (honest)   | 3.0000 ± 0.1000 | 9.0000 ± 0.2000 |
| honest minus one pass                 | 0.0000 ± 0.0000 | 8.5000 ± 0.3000 |
| bits per byte in one pass             |          1.4427 |          0.2404 |
| bits per byte, honest                 |          1.4427 |          4.3281 |"""


def log(folder, version, lines):
    path = folder / "csv" / f"version_{version}" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(["lr,step,train/loss,val/loss", *lines]) + "\n")


@pytest.fixture
def sides():
    def side(train, one_pass, honest, gap):
        curves = {"train": [(10, 4.0), (20, train)], "val": [(20, 3.5)]}
        samples = [["def ", "f(x):\n\n    pass"], ["a", "b"]]
        return {
            "parameters": 1234,
            "curves": curves,
            "one_pass": one_pass,
            "honest": honest,
            "gap": gap,
            "samples": samples,
        }

    masked = side(2.0, Estimate(3.0, 0.1), Estimate(3.0, 0.1), Estimate(-1e-9, 1e-9))
    return {"masked": masked, "unmasked": side(0.1, Estimate(0.5, 0.1), Estimate(9.0, 0.2), Estimate(8.5, 0.3))}


def test_of_a_resumed_run_the_newer_rows_count(tmp_path):
    log(tmp_path, 2, ["0.1,10,5.0,", "0.1,20,4.0,", "0.1,19,,4.5", "0.1,30,9.0,"])
    log(tmp_path, 10, ["0.1,30,3.0,", "0.1,40,2.0,", "0.1,39,,2.5"])
    assert read_curves(tmp_path) == {
        "train": [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)],
        "val": [(19, 4.5), (39, 2.5)],
    }


def test_runs_without_curves_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no csv/version_.*; train with logger=csv"):
        read_curves(tmp_path)
    log(tmp_path, 0, ["0.1,10,5.0,"])
    with pytest.raises(ValueError, match="has no val/loss"):
        read_curves(tmp_path)


def test_the_table(sides):
    assert table(sides, bytes_per_token=3.0) == TABLE
    assert 3.0 / math.log(2) / 3.0 == pytest.approx(1.4427, abs=5e-5)


def test_the_page_has_remark_table_picture_and_both_texts_of_every_prompt(sides):
    sides["unmasked"]["samples"] = [["def ", "```"], ["a", "c"]]
    assert page(sides, "THE TABLE", "A remark.").startswith(
        "# With and without the causal mask\n\nA remark.\n\nTHE TABLE\n\n![Losses of both runs](control.png)\n\n"
        "## Continuations of `'def '`\n\nmasked:\n\n    def f(x):\n    \n        pass\n\nunmasked:\n\n    def ```\n\n"
        "## Continuations of `'a'`"
    )


def test_the_picture_shows_both_curves_four_losses_and_the_uniform_guess(sides, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    original = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *rest, **more: (figures.append(self), original(self, *rest, **more))
    )
    plot(tmp_path / "a.png", sides, math.log(4096))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    left, right = figures[0].axes
    for name, line in zip(SIDES, left.lines):
        assert line.get_label() == name and list(zip(*line.get_data())) == sides[name]["curves"]["train"]
    heights = {label.get_text(): bar.get_height() for label, bar in zip(right.get_xticklabels(), right.patches)}
    assert heights == {
        "masked,\none pass": 3.0,
        "masked,\nprefix alone": 3.0,
        "unmasked,\none pass": 0.5,
        "unmasked,\nprefix alone": 9.0,
    }
    for axes in (left, right):
        assert list(axes.lines[-1].get_ydata()) == [math.log(4096)] * 2
        assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > math.log(4096)
