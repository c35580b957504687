"""The process of a run: who ends it, who waits for it, its exit status, and the estimated time left."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tril.model.runs import state_of
from tril.scripts.experiments import run_process
from tril.scripts.experiments.run_process import locked, train

PARENT = """
import sys
from pathlib import Path
from tril.scripts.experiments.run_process import locked, spawn
with locked(Path("run")) as lock:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
    spawn([sys.executable, "-c", code], Path("log.txt"), lock)
"""
SUMMARY = {"final_val_loss": 1.5, "final_val_bpb": 0.5, "seconds": 61.0}


def is_free(folder) -> bool:
    with locked(folder) as lock:
        return lock is not None


@pytest.mark.skipif(sys.platform == "win32", reason="a process on Windows cannot inherit the lock")
@pytest.mark.parametrize(
    ("how", "status", "free"), [(signal.SIGTERM, 128 + signal.SIGTERM, True), (signal.SIGKILL, -signal.SIGKILL, False)]
)
def test_run_ends_with_its_sweep_or_keeps_the_lock(how, status, free, tmp_path):
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
    assert is_free(tmp_path / "run") == free
    if not free:
        os.kill(int(log.read_text()), signal.SIGKILL)


def test_run_of_another_process_is_waited_for_and_not_trained_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_process, "spawn", lambda *arguments: pytest.fail("it was finished"))
    monkeypatch.setattr(run_process, "LOCK_POLL_SECONDS", 0.01)
    folder, losses = tmp_path / "run", []
    with locked(folder):
        waiting = threading.Thread(target=lambda: losses.append(train(folder, [], "run")))
        waiting.start()
        while "wait    run: another process is training it" not in (output := capsys.readouterr().out):
            assert waiting.is_alive(), output
            time.sleep(0.01)
        (folder / "summary.json").write_text(json.dumps(SUMMARY))
    waiting.join()
    assert losses == [1.5]
    assert (
        capsys.readouterr().out
        == "done    run was finished before: 1.5000 nats per token, 0.5000 bits per byte, 00:01:01\n"
    )


@pytest.fixture
def spawned(monkeypatch):
    """Runs no process: a function that sets its exit status, its summary.json and its output; the list of commands."""
    commands = []

    def end_with(status, summary=None, output=""):
        def spawn(arguments, log, lock):
            commands.append(arguments)
            log.write_text(output)
            if summary:
                (log.parent / "summary.json").write_text(json.dumps(summary))
            return status

        monkeypatch.setattr(run_process, "spawn", spawn)
        return commands

    return end_with


def test_run_is_started_as_a_module_and_resumed_from_its_checkpoint(tmp_path, spawned, capsys):
    commands, folder = spawned(0, SUMMARY), tmp_path / "a,b=1"
    assert train(folder, ["model.dim=8"], "a") == 1.5
    assert commands == [[sys.executable, "-P", "-m", "tril.train", "model.dim=8", f"hydra.run.dir={folder}"]]
    (folder / "summary.json").unlink()
    (folder / "leftover").mkdir()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "last.ckpt").touch()
    train(folder, ["model.dim=8", "allow_targets=[a.B]"], "a")
    assert commands[1][3:] == ["tril.train", f"resume={folder}", "allow_targets=[a.B]"]
    assert (folder / "leftover").is_dir()
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / "last.ckpt").unlink()
    train(folder, ["model.dim=8"], "a")
    assert commands[2] == commands[0] and not (folder / "leftover").exists()
    assert capsys.readouterr().out.count("done    a finished: 1.5000 nats per token") == 3


@pytest.mark.parametrize("status", [128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM])
def test_stopped_run_is_unfinished_and_not_failed(status, tmp_path, spawned, capsys):
    spawned(status, output="stopped by SIGTERM at step 3\n")
    assert math.isnan(train(tmp_path / "run", [], "run"))
    assert state_of(tmp_path / "run") == "unfinished"
    assert capsys.readouterr().out.endswith("stopped run by a signal; start the same command again to continue\n")


@pytest.mark.parametrize(("output", "message"), [("\nerror: x\n \n", "error: x"), ("", "ended with status 1")])
def test_failed_run_keeps_the_last_line_of_its_output(output, message, tmp_path, spawned, capsys):
    spawned(1, output=output)
    assert math.isnan(train(tmp_path / "run", [], "run"))
    assert json.loads((tmp_path / "run" / "failed.json").read_text()) == {"status": 1, "message": message}
    assert state_of(tmp_path / "run") == "failed" and f"FAILED  run: {message} (status 1, " in capsys.readouterr().out
    spawned(0, SUMMARY)
    assert train(tmp_path / "run", [], "run") == 1.5 and not (tmp_path / "run" / "failed.json").exists()


def test_diverged_run_is_finished(tmp_path, spawned, capsys):
    """Its losses are null in summary.json, since JSON has no NaN."""
    spawned(0, SUMMARY | {"final_val_loss": None, "final_val_bpb": None})
    assert math.isnan(train(tmp_path / "run", [], "run"))
    assert "done    run finished: nan nats per token, nan bits per byte" in capsys.readouterr().out
