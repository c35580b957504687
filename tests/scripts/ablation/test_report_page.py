"""A sweep's report: its numbers tested against independent arithmetic, and its sentences."""

import json
import math
import statistics

import numpy as np
import pytest

from tests.scripts.ablation.synthetic import BYTES_PER_TOKEN, FOUR, HEADS, ONE, SEEDS, draw_all, sweep_of
from tril.model.intervals import Interval
from tril.scripts.ablation.comparisons import compare_with_baseline
from tril.scripts.ablation.report import answer, write_up
from tril.scripts.ablation.report_tables import (
    compared,
    costs,
    losses,
    p_value,
    read_configs,
    settings,
    spread,
    unfinished_runs,
)
from tril.scripts.ablation.results import read_sweep
from tril.scripts.ablation.templates import render

T = 4.302652729911275  # 97.5 % quantile of Student's t with 2 degrees of freedom, for 3 seeds


def said(sweep, which="final"):
    return answer(sweep, which, compare_with_baseline(sweep, which))


def content(sweep, pictures=(), which="final"):
    """The values of the templates."""
    comparisons = compare_with_baseline(sweep, which)
    return write_up(sweep, which, comparisons=comparisons, configs=read_configs(sweep), pictures=list(pictures))


def paragraphs(sweep, **options):
    """The paragraphs of report.md without its escapes."""
    return render("report.md.jinja", **content(sweep, **options)).replace("\\", "").split("\n\n")


def warnings(sweep):
    return [line.removeprefix("**Warning.** ") for line in paragraphs(sweep) if line.startswith("**Warning.** ")]


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def shown(values, quantile=T):
    """Mean ± half of its interval, by the textbook."""
    return f"{statistics.fmean(values):.4f} ± {quantile * statistics.stdev(values) / math.sqrt(len(values)):.4f}"


def test_losses_with_intervals(tmp_path):
    table = losses(sweep_of(tmp_path))
    for row, name, values in zip(table.rows, ("n_heads=1", "n_heads=4 (baseline)"), (ONE, FOUR), strict=True):
        best = [value - 0.01 for value in values]
        bits = [[value / math.log(2) / BYTES_PER_TOKEN for value in some] for some in (values, best)]
        assert row == [name, "3", shown(values), shown(bits[0]), shown(best), shown(bits[1])]


def test_one_seed_gives_no_interval(tmp_path):
    sweep = sweep_of(tmp_path, {(1,): {0: 3.1}, (4,): {0: 3.0}})
    assert losses(sweep).rows[0][1:4] == [
        "1 (one seed: no interval)",
        "3.1000",
        f"{3.1 / math.log(2) / BYTES_PER_TOKEN:.4f}",
    ]
    tables = [value for value in content(sweep).values() if hasattr(value, "rows")]
    assert len(tables) == 10 and not any("±" in text for table in tables for row in table.rows for text in row)
    assert (
        said(sweep) == "Against n_heads=4: n_heads=1 is not compared, because fewer than two seeds are common to both "
        "(one seed: no interval)."
    )
    assert compared(compare_with_baseline(sweep)).rows[0][:6] == [
        "n_heads=1",
        "one seed",
        "+0.1000",
        "nats per token",
        "-",
        "1",
    ]
    assert any(line.startswith("One seed: no interval.") for line in paragraphs(sweep))


def test_unfinished_runs_are_named_and_not_in_the_means(tmp_path):
    runs = {
        (1,): {0: 3.1, 1: "failed", 2: 3.16},
        (4,): {**HEADS[4,], 3: "unfinished"},
        (8,): {0: 3.2, 1: "not started", 2: "unfinished"},
    }
    sweep = sweep_of(tmp_path, runs)
    text = paragraphs(sweep)
    start = text.index("## What was swept") + 1
    assert text[start : start + 3] == ["model.n_heads: 1, 4, 8", "seed: 0, 1, 2, 3", "Baseline: n_heads=4."]
    assert any(line.startswith("Unfinished runs are not included in the means") for line in text)
    assert (
        text[start + 3]
        == "10 runs, each of one variant with one seed: 6 finished, 2 unfinished, 1 failed, 1 not started."
    )
    assert unfinished_runs(sweep).rows == [
        ["n_heads=1", "1", "failed", "RuntimeError: out of memory"],
        ["n_heads=4", "3", "unfinished", ""],
        ["n_heads=8", "1", "not started", ""],
        ["n_heads=8", "2", "unfinished", ""],
    ]
    rows = losses(sweep).rows
    assert [row[1] for row in rows] == ["2 of 3", "3 of 4", "1 of 3 (one seed: no interval)"]
    assert rows[0][2].startswith("3.1300 ± ") and rows[1][2] == shown(FOUR) and rows[2][2] == "3.2000"
    assert "n_heads=1 is not compared yet, because its stage has unfinished runs; n_heads=8 is not" in said(sweep)
    assert said(sweep).endswith(" 4 of 10 runs have not finished.")


def test_nothing_finished(tmp_path, drawn):
    sweep = sweep_of(tmp_path, {(1,): {0: "unfinished", 1: "not started"}, (4,): {0: "not started", 1: "not started"}})
    assert said(sweep) == "No run has finished, so there is nothing to compare yet. 4 of 4 runs have not finished."
    assert [row[1:3] for row in losses(sweep).rows] == [["0 of 2", "-"]] * 2
    assert costs(sweep).rows[0] == ["n_heads=1", "1,000", "800", "900", "6,000", "-", "-", "-", "-"]  # as planned
    assert draw_all(sweep, tmp_path) == []  # the unfinished run has one validation, which is no curve
    sweep = sweep_of(tmp_path / "base", HEADS | {(4,): {0: "unfinished"}})
    assert said(sweep).startswith("No run of the baseline n_heads=4 has finished")
    sweep = sweep_of(tmp_path / "none", {(1,): {0: "not started"}}, baseline=(1,))
    text = paragraphs(sweep, pictures=draw_all(sweep, tmp_path))
    assert text[text.index("## Losses") + 1] == "There is no validation loss to draw yet."
    assert text[text.index("## Settings of the runs") + 1] == "No run has started."


def test_one_variant_alone(tmp_path, drawn):
    sweep = sweep_of(tmp_path, {(): dict(zip(SEEDS, ONE, strict=True))}, (), ())
    assert f": final validation loss {shown(ONE)} nats per token over 3 seeds." in said(sweep)
    assert "There is no other variant to compare it with." in paragraphs(sweep)
    assert draw_all(sweep, tmp_path)[-1].file == "final_loss.png"
    sweep = sweep_of(tmp_path / "one", {(): {0: 3.1}}, (), ())
    assert "final validation loss 3.1000 (one seed: no interval) nats per token over 1 seed." in said(sweep)


@pytest.mark.filterwarnings("error")
def test_diverged_run_has_no_mean_and_no_point(tmp_path, drawn):
    sweep = sweep_of(tmp_path, {(1,): {0: 3.1, 1: math.nan}, (2,): {0: 3.1, 1: 3.2}, (4,): {0: 3.0, 1: 3.01}})
    assert losses(sweep).rows[0] == ["n_heads=1", "2", *["diverged"] * 4]
    assert any(line.startswith("Diverged: ") for line in paragraphs(sweep))
    assert "n_heads=1 is not compared, because a loss is not a finite number" in said(sweep)
    row = compared(compare_with_baseline(sweep)).rows[0]
    assert row[1:3] == ["diverged", "diverged"] and row[4] == "-"
    draw_all(sweep, tmp_path)
    assert drawn["final_loss.png"].axes[0].lines[0].get_xdata().tolist() == [1]  # the first point is that of 2
    assert [label.get_text() for label in drawn["loss_tokens.png"].legends[0].texts] == [
        "n_heads=1",
        "n_heads=2",
        "n_heads=4",
    ]


def test_best_losses_are_compared_on_request(tmp_path):
    sweep = sweep_of(tmp_path)
    path = sweep.variants[0].runs[0].folder / "windows_best.npz"
    np.savez(path, step=75, context_length=32, nll=np.full(8, 99.0 * 32), targets=np.full(8, 32))
    sweep = read_sweep(sweep.folder)
    for which, difference in (("final", "+0.0967 ± "), ("best", "+32.0667 ± ")):  # (99 - 3.09) / 3 is 31.97 more
        assert compared(compare_with_baseline(sweep, which)).rows[0][2].startswith(difference)
        assert f"## Compared with n_heads=4: {which} validation loss" in paragraphs(sweep, which=which)


def test_sizes_and_speeds(tmp_path):
    sweep = sweep_of(tmp_path, summary={(1,): {"parameters": 12345, "flops_per_token": 3e7, "peak_memory_gb": 1.254}})
    for run, speed, seconds in zip(sweep.variants[0].runs, (1000, 1300, 9000), (70.4, 90, 10), strict=True):
        edit(run.folder / "summary.json", tokens_per_second=speed, seconds=seconds)
    rows = costs(read_sweep(sweep.folder)).rows
    assert rows[0] == ["n_heads=1", "12,345", "800", "900", "30,000,000", "1.920e+11", "1,300", "1.25", "70"]
    assert rows[1] == ["n_heads=4", "1,000", "800", "900", "6,000", "38,400,000", "1,000", "0.50", "8"]


def test_settings_and_warnings(tmp_path):
    sweep = sweep_of(
        tmp_path, summary={(1,): {"threads": 2, "device": "A"}, (4,): {"threads": 2, "device": "A", "code": "abc+"}}
    )
    differ, same = ["model.n_heads", "differs: 1; 4"], [["model.context_length", "32"], ["training tokens", "6,400"]]
    code, others = ["code version", "differs: null; abc+"], [["device", "A"], ["threads", "2"]]
    assert settings(sweep, read_configs(sweep)).rows == [differ, *same, code, *others]
    (found,) = warnings(sweep)
    assert found.startswith(
        "The finished runs differ in their code version: not recorded (3 runs); abc+ (3 runs). Differences between"
    )
    edit(
        sweep.variants[1].runs[0].folder / "summary.json",
        threads=8,
        data_fingerprint="other",
        causality="LEAKS, losses are false",
    )
    found = warnings(read_sweep(sweep.folder))
    assert found[1].startswith("The finished runs differ in their threads: 2 (5 runs); 8 (1 run).")
    assert "compare bits per byte" in found[2] and found[3].startswith("The losses of 1 finished run are invalid")
    assert warnings(sweep_of(tmp_path / "same")) == []
    (sweep.variants[0].runs[0].folder / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml cannot be read"):
        read_configs(sweep)


def test_numbers_as_text():
    assert spread(Interval(2.5, 2.4999, 2.5001, 3)) == "2.50000 ± 0.00010"
    assert spread(Interval(-2.5, -3.5, -1.5, 3), sign="+") == "-2.5000 ± 1.0000"
    assert spread(Interval(2.5, 2.5, 2.5, 3)) == "2.5000 ± 0.0000" and spread(None) == "-"
    assert spread(Interval(2.5, None, None, 1), alone=" (one)") == "2.5000 (one)"
    assert [p_value(p) for p in (None, 1e-9, 0.0123, 1.0)] == ["-", "below 0.0001", "0.012", "1"]
