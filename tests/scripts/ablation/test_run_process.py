"""The process of a cell: who ends it, who waits for it, and what is known of how far it is."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tril.model.runs import new_folder, state_of
from tril.scripts.ablation.run_process import locked, time_left, train

PARENT = """
import sys
from pathlib import Path
from tril.scripts.ablation.run_process import locked, spawn
with locked(Path("cell"), "cell") as lock:
    spawn([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(300)"], Path("log.txt"), lock)
"""


def is_free(lock) -> bool:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@pytest.mark.parametrize(
    ("how", "status", "free"), [(signal.SIGTERM, 128 + signal.SIGTERM, True), (signal.SIGKILL, -signal.SIGKILL, False)]
)
def test_a_cell_ends_with_its_sweep_or_keeps_its_lock(how, status, free, tmp_path):
    log = tmp_path / "log.txt"
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path) as parent:
        while not log.is_file() or not log.read_text().endswith("\n"):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(how)
        try:
            parent.wait(timeout=30)
        except subprocess.TimeoutExpired:
            parent.kill()
    assert parent.returncode == status
    assert is_free(tmp_path / ".cell.lock") == free
    if not free:
        os.kill(int(log.read_text()), signal.SIGKILL)


def test_a_cell_that_another_process_works_on_is_waited_for_and_not_trained_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tril.scripts.ablation.run_process.spawn", lambda *arguments: pytest.fail("it was finished"))
    folder, losses = tmp_path / "cell", []
    with locked(folder, "other"):
        waiting = threading.Thread(target=lambda: losses.append(train(folder, [], "cell")))
        waiting.start()
        while "wait    cell: another process is at work on it" not in (said := capsys.readouterr().out):
            assert waiting.is_alive(), said
            time.sleep(0.01)
        (folder / "summary.json").write_text(json.dumps({"final_val_loss": 1.5, "final_val_bpb": 0.5, "seconds": 61.0}))
    waiting.join()
    assert losses == [1.5]
    assert (
        capsys.readouterr().out
        == "done    cell was finished before: 1.5000 nats per token, 0.5000 bits per byte, 00:01:01\n"
    )


def test_the_time_left_is_corrected_by_what_the_finished_cells_took(tmp_path):
    cells = [{"folder": name, "estimated_seconds": 100.0} for name in ("a", "b", "c")]
    assert time_left(tmp_path, cells) is None
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps({"seconds": 150.0}))
    assert time_left(tmp_path, cells) == "00:05:00"
    assert time_left(tmp_path, [*cells, {"folder": "d", "estimated_seconds": None}]) is None


def test_states_and_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = new_folder("outputs"), new_folder("outputs")
    assert first != second and first.is_dir() and second.is_dir() and first.parent.parent.name == "outputs"
    assert [state_of(first), state_of("nowhere")] == ["unfinished", "not started"]
    (first / "failed.json").touch()
    assert state_of(first) == "failed"
    (first / "summary.json").touch()
    assert state_of(first) == "finished"
