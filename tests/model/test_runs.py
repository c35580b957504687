"""Where runs and checkpoints are found, and paths that move with a folder."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tril.model.runs import METRICS, Run, find_checkpoint, find_sweep, new_folder, read_settings, run_folder, state_of


def touch(path, age=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))  # on Windows
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_checkpoints_in_a_folder(home):
    last = touch(home / "run" / "checkpoints" / "last.ckpt")
    assert find_checkpoint(home / "run") == last and run_folder(last) == home / "run"
    best = touch(home / "run" / "checkpoints" / "best.ckpt")
    assert find_checkpoint("~/run") == best == find_checkpoint("~/run/checkpoints/best.ckpt")
    assert find_checkpoint(home / "run", prefer=("last",)) == last == find_checkpoint(last.parent, prefer=("last",))
    (home / "empty").mkdir()
    for path, message in (
        ("~/empty", "empty contains no checkpoints/best.ckpt or checkpoints/last.ckpt; name"),
        ("~/b", "home.b does not exist"),
        ("", "an empty path names nothing"),
        ("~no-such-user-of-tril/b", "~no-such-user-of-tril/b does not exist"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            find_checkpoint(path)


def test_latest_is_the_newest(home, tmp_path):
    for find, message in (
        (find_checkpoint, "no checkpoint below outputs/ or multirun/"),
        (find_sweep, "no sweep.json"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            find("latest")
    touch(tmp_path / "outputs" / "old" / "checkpoints" / "best.ckpt", age=9)
    new = touch(tmp_path / "multirun" / "new" / "checkpoints" / "last.ckpt")
    assert find_checkpoint("latest") == new.relative_to(tmp_path)
    touch(tmp_path / "multirun" / "a" / "sweep.json", age=9)
    new = touch(tmp_path / "multirun" / "b" / "sweep.json")
    assert find_sweep("latest") == new.parent.relative_to(tmp_path)


def test_runs_of_the_same_second_get_separate_folders(home):
    folders = {new_folder("outputs") for _ in range(4)}
    assert len(folders) == 4 and all(folder.is_dir() for folder in folders)


def test_the_state_of_a_run(tmp_path):
    run = tmp_path / "run"
    assert state_of(run) == "not started"
    run.mkdir()
    assert state_of(run) == "unfinished"
    touch(run / "failed.json")
    assert state_of(run) == "failed"
    touch(run / "summary.json")
    assert state_of(run) == "finished"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "csv" / "version_0").mkdir(parents=True)
    (tmp_path / METRICS).write_text("step,train/loss,val/loss\n4,2.5,\n4,,3.0\n8,nan,\n")
    (tmp_path / "config.yaml").write_text(
        "model: {dim: 8, name: '${x}', text: '1e-3', day: '2026-01-02'}\nnone: null\n"
    )
    return Run(tmp_path)


def test_the_files_of_a_run_are_read_as_plain_values(run):
    model = {"dim": 8, "name": "${x}", "text": "1e-3", "day": "2026-01-02"}
    assert run.settings == {"model": model, "none": None}
    assert (run.config.model.dim, run.config.model.name, run.config.none) == (8, "${x}", None)
    assert [list(row) for row in run.metrics] == [["step", "train/loss"], ["step", "val/loss"], ["step", "train/loss"]]
    assert run.metrics[1] == {"step": 4, "val/loss": 3.0} and type(run.metrics[1]["step"]) is int


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("e.-:~#'1x\n é"),
    lambda values: st.lists(values) | st.dictionaries(st.text("ab.*/"), values),
)


@given(PLAIN)
def test_settings_come_back_as_they_were_written(value):
    values = {"key": value}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        path.write_text(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), encoding="utf-8")
        found = read_settings(path)
    assert repr(found) == repr(values)  # 1 is not 1.0, nor True


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
DAMAGED = {
    "config.yaml": [b"a: [", b"[" * 3000, b"a: &a [*a]", BOMB.encode(), b"a: !!python/name:os.system", b"\xff", b"[1]"],
    "summary.json": [b"{", b"[1]", b"\xff", b"[" * 100_000],
    METRICS: [b"step,a\n1,2,3\n", b"step,a\nx,2\n", b"a\n2\n", b"\xff\n", b"step,a\n1.5e400,1\n"],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_of_a_run_is_named_in_one_line(name, run):
    for content in DAMAGED[name]:
        (run.folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=name) as error:
            getattr(run, {"config.yaml": "settings", "summary.json": "summary"}.get(name, "metrics"))
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_one_process_trains_a_run(run):
    code = (
        f"from tril.model.runs import Run\nfrom pathlib import Path\nwith Run(Path({str(run.folder)!r})).lock(): pass"
    )
    with run.lock():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert f"ValueError: another process trains the run in {run.folder}; wait" in done.stderr
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
