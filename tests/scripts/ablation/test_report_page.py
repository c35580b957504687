"""A sweep's report: its numbers against arithmetic of their own, its sentences, and what its pictures hold."""

import json
import math
import statistics

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import BYTES_PER_TOKEN, write_sweep
from tril.model.intervals import Interval
from tril.scripts.ablation import figures as report_figures
from tril.scripts.ablation.figures import ALONG, COLOURS, Picture, draw, line_styles, mean_curve, positions
from tril.scripts.ablation.report import (
    answer,
    compared,
    costs,
    losses,
    p_value,
    read_configs,
    settings,
    spread,
    swept,
    warnings,
    write_up,
)
from tril.scripts.ablation.results import Run, compare_with_baseline, read_sweep

T = 4.302652729911275  # 97.5 % quantile of Student's t with 2 degrees of freedom, so of 3 seeds
SEEDS = (0, 1, 2)
ONE, FOUR = (3.10, 3.16, 3.12), (3.00, 3.02, 3.07)
HEADS = {(1,): dict(zip(SEEDS, ONE)), (4,): dict(zip(SEEDS, FOUR))}


def sweep_of(folder, cells=HEADS, keys=("model.n_heads",), baseline=(4,), **options):
    return read_sweep(write_sweep(folder / "sweep", keys, cells, baseline=baseline, **options))


@pytest.fixture
def drawn(monkeypatch):
    """File name -> figure of all pictures, which are not saved: that takes a second each."""
    figures = {}

    def keep(figure, path, title, caption):
        figures[path.name] = figure
        return Picture(path.name, title, caption)

    monkeypatch.setattr(report_figures, "saved", keep)
    return figures


def said(sweep, which="final"):
    return answer(sweep, which, compare_with_baseline(sweep, which))


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shown(values, quantile=T):
    """Mean ± half of its interval, by the textbook."""
    return f"{statistics.fmean(values):.4f} ± {quantile * statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def quantile(p):
    """Of Student's t with 2 degrees of freedom, in closed form."""
    return (2 * p - 1) / math.sqrt(2 * p * (1 - p))


def test_losses_with_intervals(tmp_path):
    table = losses(sweep_of(tmp_path)).table
    for row, name, values in zip(table.rows, ("n_heads=1", "n_heads=4 (baseline)"), (ONE, FOUR), strict=True):
        best = [value - 0.01 for value in values]
        bits = [[value / math.log(2) / BYTES_PER_TOKEN for value in some] for some in (values, best)]
        assert row == [name, "3", shown(values), shown(bits[0]), shown(best), shown(bits[1])]


@pytest.mark.parametrize("others", [1, 2])
def test_comparison_with_the_baseline(tmp_path, others):
    cells = HEADS | ({(8,): dict(zip(SEEDS, FOUR))} if others == 2 else {})
    sweep = sweep_of(tmp_path, cells)
    found = compare_with_baseline(sweep, "final")
    section = compared(sweep, "final", found)
    differences = [
        one - four for one, four in zip(ONE, FOUR)
    ]  # the same in every window, so seeds alone make the spread
    error = statistics.stdev(differences) / math.sqrt(3)
    t = statistics.fmean(differences) / error
    p = min(1, others * (1 - t / math.sqrt(2 + t * t)))
    assert quantile(0.975) == pytest.approx(T)
    interval = shown(differences, quantile(1 - 0.025 / others))
    verdict = ["not distinguishable", str(found["n_heads=1"].more_seeds), ""]
    assert section.table.rows[0] == ["n_heads=1", "3", f"+{interval}", "nats per token", f"{p:.2g}", *verdict]
    assert section.title == "Compared with n_heads=4: final validation loss"
    assert (
        f"multiplied by {others}, and the number behind ± is half of a {100 - 5 / others:g} % interval"
        in section.after[1]
    )


def test_the_answer_names_better_worse_and_not_distinguishable(tmp_path):
    worse, better = ({seed: value + shift + 0.001 * seed for seed, value in zip(SEEDS, FOUR)} for shift in (0.1, -0.1))
    sweep = sweep_of(tmp_path, HEADS | {(8,): worse, (2,): better, (16,): dict(zip(SEEDS, (3.05, 2.99, 3.05)))})
    half = quantile(1 - 0.025 / 4) * 0.001 / math.sqrt(3)
    assert said(sweep) == (
        f"Against n_heads=4, over 3 seeds: n_heads=2 is better by 0.0990 ± {half:.4f} nats per token; n_heads=8 is worse by 0.1010 ± "
        f"{half:.4f} nats per token; n_heads=1, n_heads=16 are not distinguishable from it."
    )


def test_the_answer_has_the_unit_of_the_comparison(tmp_path):
    higher = {seed: value + 3 + 0.01 * seed for seed, value in zip(SEEDS, FOUR)}
    sweep = sweep_of(tmp_path, HEADS | {(1,): higher}, summary={(1,): {"data_fingerprint": "other"}})
    bits = [(3 + 0.01 * seed) / math.log(2) / BYTES_PER_TOKEN for seed in SEEDS]
    assert said(sweep) == f"Against n_heads=4, over 3 seeds: n_heads=1 is worse by {shown(bits)} bits per byte."


def test_one_seed_gives_no_interval(tmp_path):
    sweep = sweep_of(tmp_path, {(1,): {0: 3.1}, (4,): {0: 3.0}})
    assert losses(sweep).table.rows[0][1:4] == [
        "1 (one seed: no interval)",
        "3.1000",
        f"{3.1 / math.log(2) / BYTES_PER_TOKEN:.4f}",
    ]
    comparisons = compare_with_baseline(sweep)
    report = write_up(sweep, "final", comparisons=comparisons, configs=[], pictures=[])
    assert not any(
        "±" in cell for section in report.sections if section.table for row in section.table.rows for cell in row
    )
    assert (
        report.answer
        == "Against n_heads=4: n_heads=1 is not compared, for want of a second seed in common (one seed: no interval)."
    )
    assert compared(sweep, "final", comparisons).table.rows[0][:6] == [
        "n_heads=1",
        "1",
        "+0.1000",
        "nats per token",
        "-",
        "one seed",
    ]
    assert any(line.startswith("One seed: no interval.") for line in losses(sweep).after)


def test_unfinished_cells_are_named_and_in_no_mean(tmp_path):
    cells = {
        (1,): {0: 3.1, 1: "failed", 2: 3.16},
        (4,): {**HEADS[4,], 3: "unfinished"},
        (8,): {0: 3.2, 1: "not started", 2: "unfinished"},
    }
    sweep = sweep_of(tmp_path, cells)
    section = swept(sweep)
    assert section.before[:3] == ["model.n_heads: 1, 4, 8", "seed: 0, 1, 2, 3", "Baseline: n_heads=4."]
    assert (
        section.before[3]
        == "10 cells, each a run of one variant with one seed: 6 finished, 2 unfinished, 1 failed, 1 not started."
    )
    assert section.table.rows == [
        ["n_heads=1", "1", "failed", "RuntimeError: out of memory"],
        ["n_heads=4", "3", "unfinished", ""],
        ["n_heads=8", "1", "not started", ""],
        ["n_heads=8", "2", "unfinished", ""],
    ]
    rows = losses(sweep).table.rows
    assert [row[1] for row in rows] == ["2 of 3", "3 of 4", "1 of 3 (one seed: no interval)"]
    assert rows[0][2].startswith("3.1300 ± ") and rows[1][2] == shown(FOUR) and rows[2][2] == "3.2000"
    assert "over 2 seeds: n_heads=1 is not distinguishable from it; n_heads=8 is not compared" in said(sweep)
    assert said(sweep).endswith(" 4 of 10 cells have not finished.")


def test_nothing_finished(tmp_path, drawn):
    sweep = sweep_of(tmp_path, {(1,): {0: "unfinished", 1: "not started"}, (4,): {0: "not started", 1: "not started"}})
    assert said(sweep) == "No cell has finished, so there is nothing to compare yet. 4 of 4 cells have not finished."
    assert [row[1:3] for row in losses(sweep).table.rows] == [["0 of 2", "-"]] * 2
    assert costs(sweep).table.rows[0] == ["n_heads=1", "1,000", "800", "900", "6,000", "-", "-", "-", "-"]  # as planned
    assert [picture.file for picture in draw(sweep, "final", tmp_path)] == [
        "loss_tokens.png",
        "loss_flops.png",
        "loss_seconds.png",
    ]
    sweep = sweep_of(tmp_path / "base", HEADS | {(4,): {0: "unfinished"}})
    assert said(sweep).startswith(
        "The baseline n_heads=4 is not finished with any seed: none of its cells has finished"
    )
    sweep = sweep_of(tmp_path / "none", {(1,): {0: "not started"}}, baseline=(1,))
    report = write_up(
        sweep, "final", comparisons={}, configs=read_configs(sweep), pictures=draw(sweep, "final", tmp_path)
    )
    assert report.sections[-1].before == ["There is no validation loss to draw yet."]
    assert report.sections[1].before == ["No cell has begun."]


def test_one_variant_alone(tmp_path, drawn):
    sweep = sweep_of(tmp_path, {(): dict(zip(SEEDS, ONE))}, (), ())
    assert f": final validation loss {shown(ONE)} nats per token over 3 seeds." in said(sweep)
    assert compared(sweep, "final", {}).before == ["There is no other variant to compare it with."]
    assert draw(sweep, "final", tmp_path)[-1].file == "final_loss.png"
    sweep = sweep_of(tmp_path / "one", {(): {0: 3.1}}, (), ())
    assert "final validation loss 3.1000 (one seed: no interval) nats per token over 1 seed." in said(sweep)


@pytest.mark.filterwarnings("error")
def test_a_diverged_run_has_no_mean_and_no_place_in_the_pictures(tmp_path, drawn):
    sweep = sweep_of(tmp_path, {(1,): {0: 3.1, 1: math.nan}, (2,): {0: 3.1, 1: 3.2}, (4,): {0: 3.0, 1: 3.01}})
    section = losses(sweep)
    assert section.table.rows[0] == ["n_heads=1", "2", *["diverged"] * 4] and section.after[-1].startswith("Diverged: ")
    assert "n_heads=1 is not compared, since a loss is not a finite number" in said(sweep)
    row = compared(sweep, "final", compare_with_baseline(sweep)).table.rows[0]
    assert row[2] == "diverged" and row[4:6] == ["-", "diverged"]
    draw(sweep, "final", tmp_path)
    assert drawn["final_loss.png"].axes[0].lines[0].get_xdata().tolist() == [1]  # the first point is that of 2
    assert [label.get_text() for label in drawn["loss_tokens.png"].legends[0].texts] == [
        "n_heads=1",
        "n_heads=2",
        "n_heads=4",
    ]


def test_best_losses_are_compared_where_they_are_asked_for(tmp_path):
    sweep = sweep_of(tmp_path)
    path = sweep.variants[0].runs[0].folder / "windows_best.npz"
    np.savez(path, step=75, context_length=32, nll=np.full(8, 99.0 * 32), targets=np.full(8, 32))
    sweep = read_sweep(sweep.folder)
    for which, difference in (("final", "+0.0967 ± "), ("best", "+32.0667 ± ")):  # (99 - 3.09) / 3 is 31.97 more
        section = compared(sweep, which, compare_with_baseline(sweep, which))
        assert section.table.rows[0][2].startswith(difference) and section.title.endswith(f": {which} validation loss")


def test_sizes_and_speeds(tmp_path):
    sweep = sweep_of(tmp_path, summary={(1,): {"parameters": 12345, "flops_per_token": 3e7, "peak_memory_gb": 1.254}})
    for run, speed, seconds in zip(sweep.variants[0].runs, (1000, 1300, 9000), (70.4, 90, 10)):
        edit(run.folder / "summary.json", tokens_per_second=speed, seconds=seconds)
    rows = costs(read_sweep(sweep.folder)).table.rows
    assert rows[0] == ["n_heads=1", "12,345", "800", "900", "30,000,000", "1.920e+11", "1,300", "1.25", "70"]
    assert rows[1] == ["n_heads=4", "1,000", "800", "900", "6,000", "38,400,000", "1,000", "0.50", "8"]


def test_settings_and_warnings(tmp_path):
    sweep = sweep_of(
        tmp_path, summary={(1,): {"threads": 2, "device": "A"}, (4,): {"threads": 2, "device": "A", "code": "abc+"}}
    )
    differ, same = ["model.n_heads", "differs: 1; 4"], [["model.context_length", "32"], ["training tokens", "6,400"]]
    code, others = ["code version", "differs: null; abc+"], [["device", "A"], ["threads", "2"]]
    assert settings(sweep, read_configs(sweep)).table.rows == [differ, *same, code, *others]
    (found,) = warnings(sweep)
    assert found.startswith(
        "The finished cells differ in their code version: not recorded (3 cells); abc+ (3 cells). Differences between"
    )
    edit(
        sweep.variants[1].runs[0].folder / "summary.json",
        threads=8,
        data_fingerprint="other",
        causality="LEAKS, losses are false",
    )
    found = warnings(read_sweep(sweep.folder))
    assert found[1].startswith("The finished cells differ in their threads: 2 (5 cells); 8 (1 cell).")
    assert "compare their bits per byte" in found[2] and found[3].startswith("The losses of 1 finished cell are false")
    assert warnings(sweep_of(tmp_path / "same")) == []
    (sweep.variants[0].runs[0].folder / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml below .* is not readable as yaml"):
        read_configs(sweep)


def test_numbers_in_words():
    assert spread(Interval(2.5, 2.4999, 2.5001, 3)) == "2.50000 ± 0.00010"
    assert spread(Interval(-2.5, -3.5, -1.5, 3), sign="+") == "-2.5000 ± 1.0000"
    assert spread(Interval(2.5, 2.5, 2.5, 3)) == "2.5000 ± 0.0000" and spread(None) == "-"
    assert spread(Interval(2.5, None, None, 1), alone=" (one)") == "2.5000 (one)"
    assert [p_value(p) for p in (None, 1e-9, 0.0123, 1.0)] == ["-", "below 0.0001", "0.012", "1"]


def run_of(steps, losses, seconds, **planned):
    steps, seconds, losses = np.array(steps), np.array(seconds, float), np.array(losses, float)
    curve = {"step": steps, "tokens": 64.0 * steps, "seconds": seconds, "loss": losses}
    return Run(None, 0, "unfinished", None, planned, curve, None, None)


def test_a_mean_curve_stands_at_the_steps_that_all_seeds_have():
    runs = [
        run_of([10, 20, 30], [4, 3, 2], [1, 2, 3], flops_per_token=5),
        run_of([10, 30, 40], [5, 2.2, 2], [3, 5, 6], flops_per_token=5),
    ]
    found = mean_curve(runs, "seconds")
    half = 12.706204736174698 * np.array([1, 0.2]) / 2  # with two values the standard error is half of their distance
    np.testing.assert_allclose([found.x, found.mean], [[2, 4], [4.5, 2.1]])
    np.testing.assert_allclose([found.low, found.high], [found.mean - half, found.mean + half])
    np.testing.assert_allclose(mean_curve(runs, "flops").x, [3200, 9600])
    alone = mean_curve(runs[:1], "tokens")
    assert alone.mean.tolist() == [4, 3, 2] and np.isnan([alone.low, alone.high]).all()
    assert alone.half().x.tolist() == [1280, 1920]
    assert mean_curve([], "tokens") is None and mean_curve([run_of([10], [4], [1])], "flops") is None
    assert (
        mean_curve([run_of([10], [4], [math.nan])], "seconds") is None
        and mean_curve([run_of([10], [math.nan], [1])], "tokens") is None
    )


def test_curves_of_unfinished_runs_are_dashed_and_in_no_mean(tmp_path, drawn):
    cells = HEADS | {(1,): {0: 3.1, 1: "unfinished"}, (8,): {0: "failed"}}
    captions = [picture.caption for picture in draw(sweep_of(tmp_path, cells), "final", tmp_path)]
    for along, last in zip(ALONG, (6400, 6400 * 6000, 6.4)):
        axes = drawn[f"loss_{along}.png"].axes[0]
        dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
        whole = [line for line in axes.lines if line.get_linestyle() == "-"]
        assert [line.get_color() for line in whole + dashed] == [*COLOURS[:2], COLOURS[0], COLOURS[2]]
        assert [line.get_ydata().tolist() for line in dashed] == [[5.0], [5.0]]
        np.testing.assert_allclose([line.get_xdata()[-1] for line in whole], last)
        np.testing.assert_allclose(whole[1].get_ydata(), statistics.fmean(FOUR) + np.array([1, 0.3, -0.01, 0]))
        low, high = axes.get_ylim()
        assert low < 3.0 and high > 5.0
    for words in (
        "its band the 95 % interval",
        "without a band is one seed: no interval",
        "a single run that has not finished",
    ):
        assert words in captions[0] and words in captions[2]


def points(axes):
    """(x, y, half of the bar) of each mean, in the order of drawing."""
    found = []
    for container in axes.containers:
        (x,), (y,) = container.lines[0].get_data()
        bars = [segment for bar in container.lines[2] for segment in bar.get_segments()]
        found.append((x, y, *(np.ptp(segment, axis=0).max() / 2 for segment in bars)))
    return found


def test_final_losses_stand_along_their_number(tmp_path, drawn):
    draw(sweep_of(tmp_path, HEADS | {(16,): {0: 3.3}, (4.1,): {0: 3.2}}), "final", tmp_path)
    axes = drawn["final_loss.png"].axes[0]
    half = [T * statistics.stdev(values) / math.sqrt(3) for values in (ONE, FOUR)]
    expected = [
        (0, statistics.fmean(ONE), half[0]),
        (2, statistics.fmean(FOUR), half[1]),
        (4, 3.3),
        (math.log2(4.1), 3.2),
    ]
    for found, wanted in zip(points(axes), expected, strict=True):
        assert found == pytest.approx(wanted)
    written = [(at, label.get_text()) for at, label in zip(axes.get_xticks(), axes.get_xticklabels())]
    assert written == [(0, "1"), (2, "4"), (4, "16")]  # no room for 4.1
    assert len(drawn) == 4 and list(drawn)[-1] == "final_loss.png"  # none by size, which is the same


def test_two_keys_interact(tmp_path, drawn):
    loss = {("relu", 1): 3.0, ("relu", 4): 2.8, ("silu", 1): 3.1, ("silu", 4): 2.5}
    cells = {values: {0: mean - 0.01, 1: mean + 0.01} for values, mean in loss.items()}
    sizes = {values: {"parameters": 1000 * values[1]} for values in loss}
    draw(sweep_of(tmp_path, cells, ("model.mlp", "model.n_heads"), ("relu", 1), summary=sizes), "final", tmp_path)
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
    assert [x for x, _, _ in points(rows)] == pytest.approx(list(loss.values())) and [
        y for _, y, _ in points(rows)
    ] == [0, -1, -2, -3]
    assert [x for x, *_ in points(drawn["final_loss_parameters.png"].axes[0])] == [1000, 4000] * 2
    assert "final_loss_training_flops.png" not in drawn


def test_places_on_an_axis():
    assert list(positions([8, 1, 4]).items()) == [("1", 0), ("4", 2), ("8", 3)]
    assert positions([10, 12, 11.5]) == {"10": 10, "11.5": 11.5, "12": 12}
    assert positions([0.9, 0.1]) == pytest.approx({"0.1": math.log2(0.1), "0.9": math.log2(0.9)})
    assert positions([0, 64]) == {"0": 0, "64": 64}
    assert positions([None, 64, "b", 64]) == {"null": 0, "64": 1, "b": 2} and positions([True, False]) == {
        "true": 0,
        "false": 1,
    }


def test_many_variants_can_be_told_apart(tmp_path):
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
