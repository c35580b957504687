"""Where runs and checkpoints are, what their files hold, damaged ones, and files that are replaced as a whole."""

import errno
import json
import math
import os

import numpy as np
import pytest

from tril.model.atomic_files import atomic_path, read_arrays, remove_leftovers, write_json, write_text
from tril.model.runs import METRICS, Run, find_checkpoint, find_sweep, new_folder, run_folder, state_of


def touch(path, age=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def test_a_checkpoint_is_found_by_its_file_or_its_folder(home):
    last = touch(home / "run" / "checkpoints" / "last.ckpt")
    assert find_checkpoint(home / "run") == last and run_folder(last) == home / "run"
    best = touch(home / "run" / "checkpoints" / "best.ckpt")
    assert find_checkpoint("~/run") == best == find_checkpoint("~/run/checkpoints/best.ckpt")
    assert find_checkpoint(home / "run", prefer=("last",)) == last == find_checkpoint(last.parent, prefer=("last",))


MISSING = [
    (find_checkpoint, "~/empty", "empty .*checkpoints/best.ckpt or checkpoints/last.ckpt"),
    (find_checkpoint, "~no-such-user-of-tril/b", "~no-such-user-of-tril/b"),
    (find_checkpoint, "latest", "outputs/ or multirun/"),
    (find_sweep, "latest", "launches.jsonl"),
    (find_checkpoint, "", "no checkpoint is named"),
    (find_sweep, "", "no sweep is named"),
]


@pytest.mark.parametrize(("find", "path", "named"), MISSING)
def test_a_missing_file_is_named(find, path, named, home):
    (home / "empty").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=named):
        find(path)


def test_latest_is_the_newest(home, tmp_path):
    touch(tmp_path / "outputs" / "old" / "checkpoints" / "best.ckpt", age=9)
    new = touch(tmp_path / "multirun" / "new" / "checkpoints" / "last.ckpt")
    assert find_checkpoint("latest") == new.relative_to(tmp_path)
    touch(tmp_path / "multirun" / "a" / "launches.jsonl", age=9)
    new = touch(tmp_path / "multirun" / "b" / "launches.jsonl")
    assert find_sweep("latest") == new.parent.relative_to(tmp_path)


def test_runs_of_the_same_second_get_separate_folders_whose_files_say_their_state(home):
    folders = {new_folder("outputs") for _ in range(4)}
    assert len(folders) == 4 and {state_of(folder) for folder in folders} == {"unfinished"}
    assert state_of(home / "nowhere") == "not started"
    for name, state in (("failed.json", "failed"), ("summary.json", "finished")):
        touch(min(folders) / name)
        assert state_of(min(folders)) == state


FILES = {
    METRICS: b"step,train/loss,val/loss\n4,2.5,\n4,,3.0\n8,nan,\n9,1",
    "config.yaml": b"model: {dim: 8, name: '${x}'}\nnone: null\n",
}


@pytest.fixture
def run(tmp_path):
    (tmp_path / "csv" / "version_0").mkdir(parents=True)
    [(tmp_path / name).write_bytes(content) for name, content in FILES.items()]
    return Run(tmp_path)


def test_the_files_of_a_run_are_read_as_plain_values_without_half_a_row(run):
    assert run.settings == {"model": {"dim": 8, "name": "${x}"}, "none": None}
    assert (run.config.model.dim, run.config.model.name, run.config.none) == (8, "${x}", None)
    assert [list(row) for row in run.metrics] == [["step", "train/loss"], ["step", "val/loss"], ["step", "train/loss"]]
    assert run.metrics[1] == {"step": 4, "val/loss": 3.0} and type(run.metrics[1]["step"]) is int


DAMAGED = [  # what is read, its file, and a content; damaged settings are in the contract
    *(("summary", "summary.json", content) for content in (b"{", b"[1]", b"\xff", b"[" * 100_000)),
    *(("summary", "summary.json", b'{"final_val_loss":1,"final_val_bpb":%s}' % x) for x in (b"[]", b'"1"', b"9" * 400)),
    *(("metrics", METRICS, b"step,a\n" + rows) for rows in (b"1,2,3\n", b"x,2\n", b"\xff\n", b"1.5e400,1\n")),
    ("metrics", METRICS, b"a\n2\n"),
    ("settings", "config.yaml", b"a: &a [1]\nb: *a"),
    ("settings", "config.yaml", b"[" * 100_000),
]


@pytest.mark.parametrize(("name", "file", "content"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_of_a_run_is_named_in_one_line(name, file, content, run):
    (run.folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=file) as error:
        getattr(run, name)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(("name", "file"), [("summary", "summary.json"), ("settings", "config.yaml")])
def test_a_pipe_in_the_folder_of_a_run_is_named_and_not_waited_for(name, file, tmp_path):
    os.mkfifo(tmp_path / file)
    with pytest.raises(ValueError, match=f"{file} is a pipe"):
        getattr(Run(tmp_path), name)


def test_an_array_that_says_it_is_shorter_is_damaged(tmp_path):
    np.savez(path := tmp_path / "a.npz", ids=np.arange(4800))
    path.write_bytes(path.read_bytes().replace(b"(4800,)", b"(4000,)"))
    with pytest.raises(ValueError, match=r"a.npz is damaged .*CRC-32"):
        read_arrays(path)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a.txt", "old é")
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise ZeroDivisionError
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "old é" and os.listdir(tmp_path) == ["a.txt"]


def test_an_archive_that_hides_an_array_is_damaged(tmp_path):
    np.savez(path := tmp_path / "a.npz", ids=np.arange(9), shape=np.arange(4))
    content = path.read_bytes()
    record = content.index(b"PK\1\2")  # of the list at the end of the file; the next has 46 + 9 bytes
    path.write_bytes(content[: record + 32] + bytes([55]) + content[record + 33 :])  # the length of a comment
    with pytest.raises(ValueError, match=r"a.npz is damaged .*1 of 2 records"):
        read_arrays(path)


@pytest.mark.parametrize(("shape", "kind"), [((10**10, 0), "f8"), ((10**10,), "V0")], ids=str)
def test_an_array_of_many_elements_without_bytes_is_damaged(shape, kind, tmp_path):
    np.savez(path := tmp_path / "a.npz", a=np.empty(shape, kind))
    with pytest.raises(ValueError, match=r"a.npz is damaged .*10000000000"):
        read_arrays(path)


NAMED = [(None, "a.txt"), (".a.txt.12.part", "a.txt"), ("b.txt", "b.txt")]  # by the system -> by the error


@pytest.mark.parametrize(("named", "expected"), NAMED, ids=str)
def test_an_error_of_a_full_disk_names_the_file(named, expected, tmp_path):
    with pytest.raises(OSError, match="No space left") as error, atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), named and str(tmp_path / named))
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / expected))
    assert os.listdir(tmp_path) == []


def test_leftovers_of_killed_processes_are_removed(tmp_path):
    (tmp_path / ".a.txt.12.part").write_text("half")
    write_text(tmp_path / "a.txt", "whole")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_values_that_json_lacks_become_null(tmp_path):
    write_json(tmp_path / "a.json", {"x": (math.inf, 2, [math.nan]), "y": -math.inf, "z": "nan"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [None, 2, [None]], "y": None, "z": "nan"}
