"""The pictures of a sweep's report: curves, points and axes of the figures."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import FOUR, HEADS, ONE, draw_all, sweep_of
from tril.scripts.ablation.curve_plots import AXES, mean_curve, plot_curves
from tril.scripts.ablation.final_loss_plots import axis_positions
from tril.scripts.ablation.plot_style import COLORS, line_styles
from tril.scripts.ablation.run_files import Run

T = 4.302652729911275  # 97.5 % quantile of Student's t with 2 degrees of freedom, for 3 seeds


def run_of(steps, losses, seconds, **planned):
    steps, seconds, losses = np.array(steps), np.array(seconds, float), np.array(losses, float)
    curve = {"step": steps, "tokens": 64.0 * steps, "seconds": seconds, "loss": losses}
    return Run(None, 0, "unfinished", None, planned, curve, None, None)


def test_mean_curve_has_the_steps_that_all_seeds_have():
    runs = [
        run_of([10, 20, 30], [4, 3, 2], [1, 2, 3], flops_per_token=5),
        run_of([10, 30, 40], [5, 2.2, 2], [3, 5, 6], flops_per_token=5),
    ]
    found = mean_curve(runs, "seconds")
    np.testing.assert_allclose([found.x, found.loss], [[2, 4], [4.5, 2.1]])
    np.testing.assert_allclose(mean_curve(runs, "flops").x, [3200, 9600])
    alone = mean_curve(runs[:1], "tokens")
    assert alone.loss.tolist() == [4, 3, 2]
    assert alone.later_half().x.tolist() == [1280, 1920]
    assert mean_curve([], "tokens") is None and mean_curve([run_of([10], [4], [1])], "flops") is None
    assert (
        mean_curve([run_of([10], [4], [math.nan])], "seconds") is None
        and mean_curve([run_of([10], [math.nan], [1])], "tokens") is None
    )


def test_curves_of_seeds_are_thin_and_those_of_unfinished_runs_dotted_and_not_in_the_means(tmp_path, drawn):
    runs = HEADS | {(1,): {0: ONE[0], 1: "unfinished", 2: ONE[2]}, (8,): {0: "failed"}}
    captions = {picture.file: picture.caption for picture in draw_all(sweep_of(tmp_path, runs), tmp_path)}
    for along, last in zip(AXES, (6400, 6400 * 6000, 6.4), strict=True):
        axes = drawn[f"loss_{along}.png"].axes[0]
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        means = [line for line in axes.lines if line.get_linewidth() > 1]
        seeds = [line for line in axes.lines if line not in dotted + means]
        assert [line.get_color() for line in means + dotted] == [*COLORS[:2], COLORS[0], COLORS[2]]
        assert [line.get_linestyle() for line in means] == ["-", "--"]  # the second is the baseline
        assert [line.get_ydata().tolist() for line in dotted] == [[5.0], [5.0]]
        np.testing.assert_allclose([line.get_xdata()[-1] for line in means], last)
        shape = np.array([1, 0.3, -0.01, 0])  # of each curve, above its last loss
        np.testing.assert_allclose(means[1].get_ydata(), statistics.fmean(FOUR) + shape)
        losses = [(COLORS[0], loss) for loss in (ONE[0], ONE[2])] + [(COLORS[1], loss) for loss in FOUR]
        assert len(seeds) == len(losses) and {line.get_linewidth() for line in seeds} == {0.6}
        for line, (color, loss) in zip(seeds, losses, strict=True):
            assert line.get_color() == color
            np.testing.assert_allclose(line.get_ydata(), loss + shape)
        low, high = axes.get_ylim()
        assert low < 3.0 and high > 5.0
    for words in ("A thin line is one seed", "The baseline is dashed", "A thin dotted line is a single unfinished run"):
        assert words in captions["loss_tokens.png"] and words in captions["loss_seconds.png"]


def means_of(axes):
    """(x, y) of each large point."""
    return [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_markersize() == 9]


def points(axes):
    """(x, y, half of the bar) of each mean, in the order of drawing."""
    found = []
    for container in axes.containers:
        (x,), (y,) = container.lines[0].get_data()
        bars = [segment for bar in container.lines[2] for segment in bar.get_segments()]
        found.append((x, y, *(np.ptp(segment, axis=0).max() / 2 for segment in bars)))
    return found


def test_final_losses_are_drawn_along_a_swept_number(tmp_path, drawn):
    draw_all(sweep_of(tmp_path, HEADS | {(16,): {0: 3.3}, (4.1,): {0: 3.2}}), tmp_path)
    axes = drawn["final_loss.png"].axes[0]
    expected = [(0, statistics.fmean(ONE)), (2, statistics.fmean(FOUR)), (4, 3.3), (math.log2(4.1), 3.2)]
    assert means_of(axes) == [pytest.approx(point) for point in expected]
    by_seed = [line.get_xydata().tolist() for line in axes.lines if line.get_color() == "0.7"]
    rest = [[math.log2(4.1), 3.2], [4, 3.3]]  # of seed 0 alone
    assert by_seed == [[[0, ONE[0]], [2, FOUR[0]], *rest], *([[0, ONE[i]], [2, FOUR[i]]] for i in (1, 2))]
    assert drawn["final_loss.png"].get_suptitle() == "Final loss of each seed, and the mean over seeds"
    assert [line.get_ydata()[0] for line in axes.lines if line.get_linestyle() == "--"] == [statistics.fmean(FOUR)]
    written = [(at, label.get_text()) for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)]
    assert written == [(0, "1"), (2, "4"), (4, "16")]  # no room for 4.1
    assert len(drawn) == 5 and list(drawn)[-1] == "final_loss.png"  # none by size, which is the same


def test_two_keys_interact(tmp_path, drawn):
    loss = {("relu", 1): 3.0, ("relu", 4): 2.8, ("silu", 1): 3.1, ("silu", 4): 2.5}
    runs = {values: {0: mean - 0.01, 1: mean + 0.01} for values, mean in loss.items()}
    sizes = {values: {"parameters": 1000 * values[1]} for values in loss}
    draw_all(sweep_of(tmp_path, runs, ("model.mlp", "model.n_heads"), ("relu", 1), summary=sizes), tmp_path)
    assert [y for _, y, _ in points(drawn["interaction_1.png"].axes[0])] == pytest.approx(
        [3.0, 3.1, 2.8, 2.5]
    )  # by heads, then relu, silu
    assert [y for _, y, _ in points(drawn["interaction_2.png"].axes[0])] == pytest.approx([3.0, 2.8, 3.1, 2.5])
    assert [round(x) for x, _, _ in points(drawn["interaction_2.png"].axes[0])] == [0, 2, 0, 2]
    assert [text.get_text() for text in drawn["interaction_1.png"].legends[0].texts] == [
        "model.n_heads=1",
        "model.n_heads=4",
    ]
    rows = drawn["final_loss.png"].axes[0]
    assert means_of(rows) == [pytest.approx((mean, -row)) for row, mean in enumerate(loss.values())]
    seed_1 = [line for line in rows.lines if line.get_color() == "0.7"][1]
    np.testing.assert_allclose(seed_1.get_xdata()[::-1], [mean + 0.01 for mean in loss.values()])
    assert [x for x, *_ in points(drawn["final_loss_parameters.png"].axes[0])] == [1000, 4000] * 2
    assert "final_loss_training_flops.png" not in drawn


def test_positions_on_an_axis():
    assert list(axis_positions([8, 1, 4]).items()) == [("1", 0), ("4", 2), ("8", 3)]
    assert axis_positions([10, 12, 11.5]) == {"10": 10, "11.5": 11.5, "12": 12}
    assert axis_positions([0.9, 0.1]) == pytest.approx({"0.1": math.log2(0.1), "0.9": math.log2(0.9)})
    assert axis_positions([0, 64]) == {"0": 0, "64": 64}
    assert axis_positions([None, 64, "b", 64]) == {"null": 0, "64": 1, "b": 2} and axis_positions([True, False]) == {
        "true": 0,
        "false": 1,
    }


def test_many_variants_are_distinguishable(tmp_path):
    numbers = sweep_of(tmp_path, {(n,): {0: 3.0} for n in (5, 1, 2, 3, 4, 6, 7, 8, 9)}, baseline=(1,))
    colours = line_styles(numbers)
    assert (
        list(colours) == [f"n_heads={n}" for n in range(1, 10)]
        and len({style["color"] for style in colours.values()}) == 9
    )
    brightness = [sum(style["color"][:3]) for style in colours.values()]
    assert brightness == sorted(brightness)
    names = sweep_of(tmp_path / "names", {(f"kind{n}",): {0: 3.0} for n in range(30)}, ("model.mlp",), ("kind0",))
    assert len({(style["color"], style["marker"]) for style in line_styles(names).values()}) == 30


def test_one_validation_is_no_curve(tmp_path):
    sweep = sweep_of(tmp_path, HEADS)
    at_end = {name: values[-1:] for name, values in sweep.runs[0].curve.items()}
    variants = [replace(v, runs=tuple(replace(run, curve=at_end) for run in v.runs)) for v in sweep.variants]
    assert len(list(plot_curves(sweep))) == len(AXES)
    assert not list(plot_curves(replace(sweep, variants=tuple(variants))))
