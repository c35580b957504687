"""The benchmark: pairs in alternating order, ratios within a repetition, and every part on a tiny model."""

import json
import sys

import pytest

from tests.calls import call
from tests.runs import TINY
from tril.scripts.maintenance import bench

STEPS = "print('\\n'.join(f'iter {i}: loss 1, time {ms}ms' for i, ms in enumerate([9, 9, 2, 4, 2, 9])))"
ROWS = {  # part -> some of its rows
    "decode": {"1 x, cache", "64 x, cache", "1 x, no cache"},
    "attention": {"explicit, length 64", "fused, length 64"},
    "start": {"python", "train.py --help", "train.py, first step"},
    "prepare": set(),
}


def run(part, text, tmp_path, *options):
    data = [f"data.path={text}", "model.vocab_size=300", f"data.cache_dir={tmp_path / 'cache'}"]
    done = call(bench.main, part, *TINY, *data, "--json=out.json", *options, cwd=tmp_path)
    return done, json.loads((tmp_path / "out.json").read_text()) if done.returncode == 0 else done.stderr


def test_tasks_alternate_and_ratios_are_of_pairs():
    calls, series = [], {"a": iter([2.0, 4.0, 6.0]), "b": iter([1.0, 8.0, 3.0])}
    tasks = {name: lambda name=name: (calls.append(name), next(series[name]))[1] for name in series}
    values = bench.interleave(tasks, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    row = [cell.strip() for cell in bench.table("s", values).splitlines()[-1].split("|")[1:-1]]
    assert row == ["b", "3", "1", "8", "0.5"]  # ratios 1/2, 2, 1/2


@pytest.mark.slow
def test_training_in_pairs_with_another_program(text, tmp_path):
    (tmp_path / "other.py").write_text(STEPS)
    options = ("--warmup=2", "--steps=3", "--vs-tokens=100", "--repeats=2")
    _, report = run("train", text, tmp_path, *options, f"--vs=python {tmp_path / 'other.py'}")
    assert report["unit"] == "tokens/s" and report["machine"]["device"] and set(report["values"]) == {"tril", "other"}
    assert report["values"]["other"] == [50_000, 50_000]  # 2 ms, the median of 2, 4, 2
    options = ("--repeats=1", "--warmup=0", "--steps=1", f"--vs={sys.executable} -c 'raise SystemExit(3)'")
    done, errors = run("train", text, tmp_path, *options)
    assert done.returncode == 2 and "ended with status 3" in errors.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("part", ROWS)
def test_every_part_measures_on_a_tiny_model(part, text, tmp_path, monkeypatch):
    for name, value in {"SHORT": 2, "LONG": 60, "LENGTHS": {"cpu": 64}}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr("tril.model.training.hardware.keep_freed_memory", lambda: None)  # of the whole process
    _, report = run(part, text, tmp_path, "--repeats=1")
    assert ROWS[part] <= set(report["values"])
    assert all(len(each) == 1 and min(each) > 0 for each in report["values"].values())
