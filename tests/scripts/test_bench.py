"""The benchmark: pairs in alternating order, ratios within a repetition, and both parts on a tiny model."""

import pytest

from tests.contract.harness import BARE, run
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.maintenance import bench, gpu

STEPS = "print('\\n'.join(f'iter {i}: loss 1, time {ms}ms' for i, ms in enumerate([9, 9, 2, 4, 2, 2])))"


@pytest.fixture
def measured(text, tmp_path, monkeypatch):
    for name, value in {"SHORT": 2, "LONG": 60}.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr("tril.model.training.hardware.keep_freed_memory", lambda: None)  # of the whole process
    data = (f"data.path={text}", "model.vocab_size=300", f"data.cache_dir={tmp_path / 'cache'}")
    always = (*BARE, *data, "--repeats=1")
    return lambda *options: run("maintenance.bench", *options, *always, cwd=tmp_path)


def test_tasks_alternate_and_ratios_are_of_pairs():
    calls, series = [], {"a": iter([2.0, 4.0, 6.0]), "b": iter([1.0, 8.0, 3.0])}
    tasks = {name: lambda name=name: (calls.append(name), next(series[name]))[1] for name in series}
    values = bench.interleave(tasks, 3)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert bench.table(values).splitlines()[-1].split() == ["b", "3", "1", "8", "0.5"]  # ratios 1/2, 2, 1/2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_command_for_a_gpu_has_valid_settings(device, tmp_path):
    for _, (module, *words), _ in gpu.parts(tmp_path, device, nanogpt="folder", small=device == "cpu"):
        name, words = module.rpartition(".")[2], [word for word in words if not word.startswith("-")]
        if name in ("train", "bench"):
            line = compose("train", words[name == "bench" :])
            RunConfig.of(line.settings, line.given)


@pytest.mark.slow
@pytest.mark.parametrize("part", bench.PARTS)
def test_every_part_measures_on_a_tiny_model(part, measured, tmp_path):
    (tmp_path / "other.py").write_text(STEPS)
    done = measured(part, *("--steps=3", f"--vs=python {tmp_path / 'other.py'}") * (part == "train"))
    assert done.returncode == 0, done.stderr
    rows = [line.split()[-4:] for line in done.stdout.partition("ratio\n")[2].splitlines()]
    assert len(rows) >= 2 and all(float(each.replace(",", "")) > 0 for row in rows for each in row)
    if part == "train":
        assert rows[1][0] == "42,670"  # 4 x 32 tokens in 3 ms, the median of 9, 9, 2, 4, 2, 2
    assert gpu.rows(done.stdout).count(";") == len(rows) - 1
