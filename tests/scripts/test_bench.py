"""The benchmark: pairs in alternating order, ratios within a repetition, and every part on a tiny model."""

import json
import sys

import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.runs import TINY
from tril.scripts.maintenance import bench

STEPS = "print('\\n'.join(f'iter {i}: loss 1, time {ms}ms' for i, ms in enumerate([9, 1, 2, 4, 2, 2])))"


@pytest.fixture
def measured(tmp_path, text):
    """A function that runs a part and returns the JSON file."""

    def run(part, *options):
        data = [f"data.path={text}", "model.vocab_size=300", f"data.cache_dir={tmp_path / 'cache'}"]
        done = call(bench.main, part, *TINY, *data, "--repeats=2", "--json=out.json", *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "out.json").read_text())
        lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
        assert [line.split("|")[1].strip() for line in lines[1:]] == list(report["values"])
        assert all(len(values) == 2 and min(values) > 0 for values in report["values"].values())
        return report

    return run


def test_tasks_alternate_and_ratios_are_of_pairs():
    calls = []
    series = {"a": iter([2.0, 4.0, 6.0]), "b": iter([1.0, 8.0, 3.0])}
    tasks = {name: lambda name=name: (calls.append(name), next(series[name]))[1] for name in series}
    values = bench.interleave(tasks, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    row = [cell.strip() for cell in bench.table("s", values).splitlines()[-1].split("|")[1:-1]]
    assert row == ["b", "3", "1", "8", "0.5"]  # ratios 1/2, 2, 1/2


def test_training_in_pairs_with_another_program(measured, tmp_path):
    (tmp_path / "other.py").write_text(STEPS)
    report = measured("train", "--warmup=2", "--steps=3", f"--vs=python {tmp_path / 'other.py'}", "--vs-tokens=100")
    assert report["unit"] == "tokens/s" and report["values"]["other"] == [50_000, 50_000]  # 2 ms, the median of 2, 4, 2
    assert report["machine"]["device"] and set(report["values"]) == {"tril", "other"}


def test_decoding_and_attention(measured, monkeypatch):
    monkeypatch.setattr(bench, "SHORT", 2)
    monkeypatch.setattr(bench, "LONG", 60)
    monkeypatch.setattr(bench, "LENGTHS", {"cpu": 64})
    monkeypatch.setattr("tril.model.training.hardware.keep_freed_memory", lambda: None)  # of the whole process
    assert {"1 x, cache", "64 x, cache", "1 x, no cache"} <= set(measured("decode")["values"])
    assert {"explicit, length 64", "fused, length 64"} <= set(measured("attention")["values"])


@pytest.mark.slow
def test_start_and_preparation(measured):
    seconds = {name: min(values) for name, values in measured("start")["values"].items()}
    assert seconds["python"] < seconds["train.py --help"] < seconds["train.py, first step"]
    assert measured("prepare")["unit"] == "seconds"


def test_a_program_that_fails_is_one_line(tmp_path, text):
    arguments = ["train", *TINY, f"data.path={text}", "model.vocab_size=300", "--steps=1", "--warmup=0"]
    done = call(bench.main, *arguments, f"--vs={sys.executable} -c 'raise SystemExit(3)'", "--repeats=1", cwd=tmp_path)
    assert done.returncode == 2 and "ended with status 3" in done.stderr.splitlines()[-1]
    assert_refused(call(bench.main, "train", "nothing=1", cwd=tmp_path), "there is no setting nothing")
