"""The panels of bench.png: lines, guides, and the axes."""

from matplotlib.figure import Figure

from tril.scripts.benchmarks.section import Plot, by_number


def drawn(plot):
    axes = Figure().subplots()
    plot.draw(axes, "title")
    return axes, {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_lines_and_labels():
    axes, lines = drawn(Plot({"a": {24: 3.0, 32: 4.0}, "b": {24: 1.0}}, "position", "ms"))
    assert lines == {"a": [[24, 3], [32, 4]], "b": [[24, 1]]}
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("title", "position", "ms")
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 4
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]


def test_logarithmic_axes_have_a_tick_at_every_point():
    axes, lines = drawn(Plot({"a": {64: 1.0, 128: 8.0}}, "length", "ms", {"O(T)": {64: 2.5, 128: 5}}, log=True))
    assert lines == {"a": [[64, 1], [128, 8]], "O(T)": [[64, 2.5], [128, 5]]}
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64", "128"]


def test_by_number():
    assert by_number({"a": [0.5, 0.25]}, 1000) == {"a": {1: 500, 2: 250}}
