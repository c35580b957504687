"""scripts/heads.py dir=SWEEP on tiny real runs: two variants with two seeds, and runs that it leaves out or refuses."""

import csv
import json
import math
import shutil

import numpy as np
import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.model.test_checkpoint import rewrite
from tests.runs import train_typed, typed
from tril.scripts.heads import main

pytestmark = pytest.mark.xdist_group("heads_sweep")  # one process of pytest-xdist has the costly fixture

FILES = ["heads.csv", "averages.csv", "ranks.png"]
OPTIONS = ["windows=8", "device=cpu"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A working directory with a sweep of model.n_heads=1,2 and seed=0,1, and a run without heads."""
    folder = tmp_path_factory.mktemp("heads_sweep")
    lines = [json.dumps({"text": f"line {i}: the square of {i} is {i * i}."}) for i in range(1000)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIL_CACHE", str(folder / "cache"))
        cells = []
        for n_heads, seed in ((1, 0), (1, 1), (2, 0), (2, 1), (0, 0)):
            name = f"heads{n_heads}-seed{seed}"
            settings = [f"model.n_heads={n_heads}", f"seed={seed}", "callbacks.samples.max_new_tokens=1"]
            where = folder / ("sweep" if n_heads else "without") / name
            train_typed(typed(f"data.path={folder / 'text.jsonl'}", *settings, f"hydra.run.dir={where}"))
            if n_heads:
                cells.append({"folder": name, "values": {"model.n_heads": n_heads}, "seed": seed})
        index = {"swept": ["model.n_heads"], "baseline": {"model.n_heads": 2}, "runs": cells}
        (folder / "sweep" / "sweep.json").write_text(json.dumps(index))
        yield folder


def heads(folder, *arguments):
    return call(main, *arguments, cwd=folder, strict=True)


def read(path):
    return list(csv.DictReader(path.open()))


def comparable(content):
    """The figures of one run, from the heads.json that `ckpt=` writes."""
    rises = {row["head"]: row["change"] for row in content["heads"]}
    figures = {
        f"layer {layer}": sum(rise for head, rise in rises.items() if head.startswith(f"L{layer}")) for layer in (0, 1)
    }
    return figures | {f"rank {n}": rise for n, rise in enumerate(sorted(rises.values())[::-1], 1)}


def test_averages_are_those_of_the_single_runs(trained):
    before = set(trained.rglob("*"))
    result = heads(trained, "dir=sweep", *OPTIONS)
    assert result.returncode == 0, result.stderr
    out = trained / "sweep" / "heads"
    assert set(trained.rglob("*")) - before == {out, *(out / name for name in FILES)}
    assert result.stderr.splitlines() == [
        f"{i} of 4: n_heads={n_heads}, seed {seed}, on cpu"
        for i, (n_heads, seed) in enumerate([(1, 0), (1, 1), (2, 0), (2, 1)], 1)
    ]
    averages, run_rows = read(out / "averages.csv"), read(out / "heads.csv")
    assert len(run_rows) == 2 * (2 + 4)
    figures = []
    for seed in (0, 1):
        single = heads(trained, f"ckpt=sweep/heads2-seed{seed}", *OPTIONS, f"out=one-{seed}")
        assert single.returncode == 0, single.stderr
        one = json.loads((trained / f"one-{seed}" / "heads.json").read_text())
        figures.append(comparable(one))
        rows = [row for row in run_rows if (row["model.n_heads"], row["seed"]) == ("2", str(seed))]
        assert [row["head"] for row in rows] == [row["head"] for row in one["heads"]]
        for row, head in zip(rows, one["heads"], strict=True):
            assert float(row["low"]) == head["low"] and row["verdict"] == head["verdict"]
            assert int(row["documents"]) == one["observations"]["documents"] >= 10
    rows = [row for row in averages if row["variant"] == "n_heads=2"]
    assert [row["quantity"] for row in rows] == list(figures[0])
    for row, values in zip(rows, zip(*(f.values() for f in figures), strict=True), strict=True):
        change, low, high = (float(row[name]) for name in ("change", "low", "high"))
        assert change == pytest.approx(np.mean(values), rel=1e-6, abs=1e-9) and low < change < high
        assert high - low > abs(values[0] - values[1]) and row["seeds"] == "2"
        assert f"{change:+.4f} ± {(high - low) / 2:.4f}" in result.stdout
    assert {row["variant"] for row in averages} == {"n_heads=1", "n_heads=2"}
    assert "over seeds" in result.stdout and (out / "ranks.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_left_out_is_named(trained, tmp_path):
    """One seed is unfinished, one diverged, and a variant has no heads: the other seeds are averaged."""
    shutil.copytree(trained / "sweep", tmp_path / "runs")
    (tmp_path / "runs" / "sweep.json").unlink()  # a folder of runs
    shutil.copytree(trained / "without" / "heads0-seed0", tmp_path / "runs" / "none")
    (tmp_path / "runs" / "heads2-seed0" / "summary.json").unlink()
    checkpoints = tmp_path / "runs" / "heads1-seed1" / "checkpoints"
    for path in checkpoints.glob("*.ckpt"):
        rewrite(path, lambda content: content["state_dict"]["model.norm.weight"].fill_(math.nan))
    result = heads(tmp_path, "dir=runs", *OPTIONS, "out=here")
    assert result.returncode == 0, result.stderr
    remarks = [
        "n_heads=2, seed 0, is unfinished: left out.",
        "n_heads=0, seed 0, has model.n_heads=0, blocks without attention heads: left out.",
        "n_heads=1, seed 1, has weights that are not finite, as its run diverged: left out.",
    ]
    assert "\n".join(remarks) in result.stdout
    rows = read(tmp_path / "here" / "averages.csv")
    assert {(row["variant"], row["seeds"], row["low"]) for row in rows} == {
        ("n_heads=1", "1", ""),
        ("n_heads=2", "1", ""),
    }


def test_refusals_are_one_line_and_leave_nothing(trained, tmp_path):
    sweep = f"dir={trained / 'sweep'}"
    assert_refused(heads(tmp_path, sweep, "ckpt=a"), "ckpt=a is for one model, dir=")
    assert_refused(heads(tmp_path, sweep, "prompt=a b"), "prompt=a b is for one model, dir=")
    assert_refused(heads(tmp_path, sweep, "windows=9999"), "whole windows of 32 tokens in the validation part")
    assert_refused(heads(tmp_path, "dir=nowhere"), "nowhere is not a folder")
    assert_refused(heads(tmp_path, "dir=latest"), "no sweep.json below multirun/")
    shutil.copytree(trained / "without", tmp_path / "without")
    only = tmp_path / "without" / "heads0-seed0"
    (only / "summary.json").rename(only / "kept.json")
    message = "has no finished run; let one finish. the configuration, seed 0, is unfinished: left out."
    assert_refused(heads(tmp_path, "dir=without"), message)
    assert not (tmp_path / "without" / "heads").exists() and not list(tmp_path.glob("h*"))
