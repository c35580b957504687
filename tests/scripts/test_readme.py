"""The figures, the sample and the pictures of README.md come from one stored run."""

import json
import re
from datetime import date
from pathlib import Path

import pytest

from tests.calls import call
from tests.conftest import assert_refused
from tests.documented import ROOT
from tests.runs import train_typed
from tril.scripts import sample
from tril.scripts.maintenance import readme
from tril.scripts.maintenance.readme import COPIED, PAGE, PICTURE, RECORD, SAMPLE_LINES, figures, trained, update

BLOCK = re.compile(r"<!-- \[\[\[cog\n.*?\]\]\] -->\n(.*?)<!-- \[\[\[end\]\]\] -->", re.DOTALL)
CPU = {"device": "AMD EPYC (cpu)", "precision": "32-true"}
STORED = CPU | {
    "final_val_bpb": 1.33961,
    "final_val_loss": 3.22849,
    "threads": 1,
    "date": "2026-11-23",
    "sample": ["def f(x):", "    return x"],
    "time": CPU | {"seconds": 268, "validations": 2, "threads": 2, "precision": "bf16-mixed", "date": "2026-11-22"},
}


def test_readme_has_the_figures_of_the_stored_run(tmp_path):
    stored = json.loads((ROOT / RECORD).read_text(encoding="utf-8"))
    [part] = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert part == f"{figures()}\n", "run `cog -P -r README.md`"
    words = " ".join(part.split())
    assert f"reached {stored['final_val_bpb']:.3f} bits per byte, {stored['final_val_loss']:.3f} nats" in words
    assert all(line in part for line in stored["sample"])


def test_the_figures_in_words(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / RECORD).write_text(json.dumps(STORED))
    text, block = figures(tmp_path).split("\n\n")
    assert " ".join(text.split()) == (
        "The run in the picture reached 1.340 bits per byte, 3.228 nats per token, on files that it had not seen "
        "(AMD EPYC, 1 thread, float32, 2026-11-23). A run takes 4 minutes 28 seconds with 2 validations, "
        "once the text is prepared (AMD EPYC, 2 threads, bf16-mixed, 2026-11-22); other seeds and machines: "
        "[docs/results.md](docs/results.md). The sample begins:"
    )
    assert block == "```text\ndef f(x):\n    return x\n```"


def test_a_run_gives_record_picture_and_page(tmp_path, configure, monkeypatch):
    def in_process(command, **_):
        if "tests.scripts.play_picture" not in command:
            return call(sample.main, *command[2:], cwd=tmp_path)
        checkpoint, name, picture = command[3:]
        assert Path(checkpoint).is_file() and name == "outputs/run/checkpoints/best.ckpt"
        Path(picture).write_text("page")

    monkeypatch.setattr(readme.subprocess, "run", in_process)
    train_typed(configure("callbacks.causality=null", "trainer.max_steps=2", "callbacks.samples=null"))
    (tmp_path / "docs").mkdir()
    (tmp_path / RECORD).write_text(json.dumps(STORED))
    (tmp_path / "README.md").write_text("A\n<!-- [[[cog\nprint(1 + 1)\n]]] -->\n3\n<!-- [[[end]]] -->\nB\n")
    measured = {"seconds": 61, "validations": 6, "threads": 1, **CPU, "date": "2026-11-24"}
    for duration, expected in ((None, STORED["time"]), (measured, measured)):  # None: the time before stays
        update(tmp_path, tmp_path / "run", duration)
        stored = json.loads((tmp_path / RECORD).read_text())
        assert stored["time"] == expected
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert {name: stored[name] for name in COPIED} == {name: summary[name] for name in COPIED}
        assert stored["sample"][0].startswith("def") and len(stored["sample"]) <= SAMPLE_LINES
    assert (tmp_path / PICTURE).read_bytes() == (tmp_path / "run" / "loss.png").read_bytes()
    assert (tmp_path / PAGE).read_text() == "page"
    assert (tmp_path / "README.md").read_text() == "A\n<!-- [[[cog\nprint(1 + 1)\n]]] -->\n2\n<!-- [[[end]]] -->\nB\n"


@pytest.mark.parametrize(
    ("loads", "measured"),
    [((0.2, 2.1), True), ((3.0, 2.1), False), ((0.2, 4.0), False)],
    ids=["free", "before", "after"],
)
def test_a_time_is_that_of_free_cores(loads, measured, tmp_path, monkeypatch):
    """Two threads are a load of two."""
    calls, loads = [], iter(loads)

    def run(command, check):
        calls.append(command[1:])
        folder = Path(command[-1].removeprefix("hydra.run.dir="))
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(CPU | {"threads": 2}))
        (folder / "csv" / "version_0").mkdir(parents=True)
        (folder / "csv" / "version_0" / "metrics.csv").write_text("step,train/loss,val/loss\n1,5.0,\n1,,4.5\n2,,4.0\n")

    monkeypatch.setattr(readme.subprocess, "run", run)
    monkeypatch.setattr(readme.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(readme.os, "cpu_count", lambda: 2)
    folder, duration = trained(tmp_path)
    assert [command[1:-1] for command in calls] == [["trainer.max_steps=1"], []]  # the text is prepared before
    assert (folder / "summary.json").is_file()
    assert (duration is not None) == measured
    if duration:
        assert duration == {**CPU, "threads": 2, "seconds": 0, "validations": 2, "date": str(date.today())}


def test_a_run_that_does_not_exist_is_one_line(tmp_path):
    assert_refused(call(readme.main, "nowhere", cwd=tmp_path), "nowhere does not exist")
