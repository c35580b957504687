"""Several processes prepare one text once; what killed ones leave is removed and not trusted."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from tests.conftest import run_python
from tril.data.cache import remove_leftovers, sync, write_file, write_folder
from tril.data.cache_locks import lock_file, locked, locked_if_free

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")

# argv: folder, what to do at the start of the validation part
PREPARE = """
import os, signal, sys, time
from pathlib import Path
from tril.data import cache, prepare
from tril.data.sources.base import Piece
from tril.data.tokenizer import TokenizerConfig

folder, action = Path(sys.argv[1]), sys.argv[2]

class Slow:
    name, split_rule, max_overlap = "slow", "two lists", None

    def fingerprint(self):
        return {}

    def pieces(self, split):
        (folder / f"read-{split}-{os.getpid()}").touch()
        if split == "val" and action == "wait":
            while not (folder / "go").exists():
                time.sleep(0.01)
        if split == "val" and action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        for i in range(100):
            yield Piece(f"{split} {i}", True)

if action.startswith("sync "):  # dies before the n-th file or folder is on the disk
    steps = int(action.split()[1])
    def counted(path, sync=cache.sync):
        global steps
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        steps -= 1
        sync(path)
    cache.sync = counted
prepared = prepare.prepare(Slow(), TokenizerConfig(kind="byte"), folder / "cache", progress=False)
print(prepared.tokens("train").tolist(), prepared.tokens("val").tolist())
"""


def start(folder, action):
    env = os.environ | {"PYTHONIOENCODING": "utf-8"}
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(folder), action],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, cwd=folder, text=True,
    )  # fmt: skip


def wait_for(folder, pattern):
    end = time.time() + 60
    while not (found := sorted(folder.glob(pattern))):
        assert time.time() < end
        time.sleep(0.01)
    return found


def expected():
    """The ids of kind=byte, in which end-of-text is 0 and a byte has the rank of its character in the vocabulary."""
    from tril.data.tokenizer import TokenizerConfig, build

    tokenizer = build(TokenizerConfig(kind="byte"), [])
    parts = [[id for i in range(100) for id in (*tokenizer.encode(f"{part} {i}").ids, 0)] for part in ("train", "val")]
    return f"{parts[0]} {parts[1]}\n"


def test_processes_that_prepare_the_same_text_do_it_once(tmp_path):
    first = start(tmp_path, "wait")
    wait_for(tmp_path, "read-val-*")
    timer = threading.Timer(30, (tmp_path / "go").touch)  # if they do not wait, they write no line
    timer.start()
    others = [start(tmp_path, "wait") for _ in range(2)]
    lines = [process.stderr.readline() for process in others]  # they wait
    timer.cancel()
    (tmp_path / "go").touch()
    results = [process.communicate(timeout=60) for process in (first, *others)]
    [folder] = (tmp_path / "cache").iterdir()  # no lock remains
    for line in lines:
        assert line.startswith(f"waiting for process {first.pid} on ") and line.endswith(f", which prepares {folder}\n")
    assert [out for out, _ in results] == [expected()] * 3
    assert [err for _, err in results] == [""] * 3  # one line each
    assert {path.name for path in tmp_path.glob("read-*")} == {f"read-{part}-{first.pid}" for part in ("train", "val")}


@pytest.mark.parametrize("action", ["die", "sync 0", "sync 2", "sync 4"])
def test_a_killed_preparation_leaves_nothing_that_is_trusted(tmp_path, action):
    """Killed while it reads, and before each of three files and two folders is on the disk."""
    cache = tmp_path / "cache"
    assert start(tmp_path, action).wait(timeout=60) == -9
    left = sorted(path.name for path in cache.iterdir())
    assert any(name.startswith(".tmp-slow-") for name in left) and ".lock" in left[0]
    assert [name for name in left if not name.startswith(".")] == ["slow-" + left[0][6:22]] * (action == "sync 4")
    done = run_python("-c", PREPARE, tmp_path, "", cwd=tmp_path)
    assert (done.stdout, done.stderr) == (expected(), "")
    assert len(list(cache.iterdir())) == 1


def test_a_process_that_dies_gives_its_waiting_one_the_work(tmp_path):
    first = start(tmp_path, "wait")
    wait_for(tmp_path, "read-val-*")
    second = start(tmp_path, "")
    second.stderr.readline()
    first.kill()
    assert second.communicate(timeout=60) == (expected(), "")
    first.communicate()
    assert len(list((tmp_path / "cache").glob(".tmp-*"))) <= 1
    remove_leftovers(tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_leftovers_of_living_processes_stay(tmp_path):
    for name in (".tmp-a-x1", ".tmp-b-x2", ".tmp-oldstyle"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    with locked(tmp_path / "a", "for the test"):
        remove_leftovers(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {".tmp-a-x1", "other", lock_file(tmp_path / "a").name}
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_a_lock_is_exclusive_and_leaves_no_file(tmp_path):
    with locked_if_free(tmp_path / "a") as first, locked_if_free(tmp_path / "a") as second:
        assert (first, second) == (True, False)
        with locked_if_free(tmp_path / "b") as other:
            assert other
    with locked_if_free(tmp_path / "a") as again:
        assert again
    assert list(tmp_path.iterdir()) == []


COUNT = """
import sys
from pathlib import Path
from tril.data.cache_locks import locked
path = Path(sys.argv[1])
for _ in range(100):
    with locked(path, "which counts"):
        number = int(path.read_text())
        path.write_text(str(number + 1))
"""


def test_no_two_processes_hold_a_lock_at_once(tmp_path):
    """Its file is removed each time, and a process may still open the removed one."""
    (tmp_path / "number").write_text("0")
    command = [sys.executable, "-c", "from tril.data import cache_locks; cache_locks.POLL_SECONDS = 0.001" + COUNT]
    processes = [subprocess.Popen([*command, tmp_path / "number"], stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 3
    assert (tmp_path / "number").read_text() == "300"


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    from tril.data import cache

    calls = []
    monkeypatch.setattr(cache, "sync", lambda path: calls.append(("sync", path.name)) or sync(path))
    for name in ("rename", "replace"):
        move = getattr(cache.Path, name)
        monkeypatch.setattr(
            cache.Path, name, lambda path, to, move=move: calls.append(("move", path.name)) or move(path, to)
        )
    write_folder(tmp_path / "a", lambda part: [(part / name).write_text(name) for name in "xy"], lambda _: True)
    assert sorted(calls[:2]) == [("sync", "x"), ("sync", "y")]
    assert calls[2:] == [("sync", "a"), ("move", "a"), ("sync", tmp_path.name)]
    calls.clear()
    write_file(tmp_path / "b", b"content")
    assert calls == [("sync", "b"), ("move", "b"), ("sync", tmp_path.name)]
    assert (tmp_path / "b").read_bytes() == b"content" and np.array_equal(sorted(os.listdir(tmp_path)), ["a", "b"])
