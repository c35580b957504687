"""Where runs and checkpoints are found, and paths that move with a folder."""

import os

import pytest

from tril.model.runs import find_checkpoint, find_sweep, new_folder, relocate, run_folder, state_of


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


def test_the_home_folder_is_expanded(home):
    file = touch(home / "runs" / "a" / "checkpoints" / "best.ckpt")
    assert find_checkpoint("~/runs/a") == file == find_checkpoint("~/runs/a/checkpoints/best.ckpt")
    assert find_sweep("~/sweep") == home / "sweep"
    with pytest.raises(FileNotFoundError, match="home.b does not exist"):
        find_checkpoint("~/b")
    with pytest.raises(FileNotFoundError, match="~no-such-user-of-tril/b does not exist"):
        find_checkpoint("~no-such-user-of-tril/b")


def test_checkpoints_in_a_folder(home):
    last = touch(home / "run" / "checkpoints" / "last.ckpt")
    assert find_checkpoint(home / "run") == last and run_folder(last) == home / "run"
    best = touch(home / "run" / "checkpoints" / "best.ckpt")
    assert find_checkpoint(home / "run") == best
    assert find_checkpoint(home / "run", prefer=("last",)) == last == find_checkpoint(last.parent, prefer=("last",))
    (home / "empty").mkdir()
    message = r"empty contains no checkpoints/best.ckpt or checkpoints/last.ckpt; name"
    with pytest.raises(FileNotFoundError, match=message):
        find_checkpoint(home / "empty")


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


def test_paths_move_with_their_folder():
    old, new = os.sep + "old", os.sep + "new"
    inside, outside = os.path.join(old, "a"), old + "er"
    value = {inside: [old, outside, 3, None, {"path": inside}], "steps": 5}
    moved = os.path.join(new, "a")
    assert relocate(value, old, new) == {moved: [new, outside, 3, None, {"path": moved}], "steps": 5}
