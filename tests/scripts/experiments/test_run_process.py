"""The process of a run: who ends it, who waits for it, and what its exit status says."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from filelock import FileLock

from tril.scripts.experiments.launch import train

PARENT = """
import sys
from pathlib import Path
from tril.scripts.experiments.launch import spawn
code = "import os, time; print(os.getpid(), flush=True); time.sleep(300)"
spawn([sys.executable, "-c", code], Path("log.txt"))
"""


def test_sigterm_ends_a_run_with_its_sweep(tmp_path):
    log = tmp_path / "log.txt"
    with subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        while not log.is_file() or not log.read_text().endswith("\n"):
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGTERM)
        assert "start the same command again to continue" in parent.communicate(timeout=30)[0]
    assert parent.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


def test_a_run_of_another_process_is_waited_for_and_not_trained_again(tmp_path, processes, capsys):
    started, folder = processes(lambda _: {"loss": 9.0}).started, tmp_path / "run"
    folder.mkdir()
    waiting = threading.Thread(target=train, args=(folder, []))
    with FileLock(tmp_path / ".run.lock"):
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive() and started == []
        (folder / "summary.json").write_text('{"final_val_loss": 1.5, "final_val_bpb": 0.5, "seconds": 61.0}')
    waiting.join()
    assert started == []
    assert re.match("done .*1.5000", capsys.readouterr().out)


def test_a_run_is_started_as_a_module_and_resumed_from_its_checkpoint(tmp_path, processes):
    commands, folder, last = processes(lambda _: (143, "")).commands, tmp_path / "a,b=1", "checkpoints/last.ckpt"
    words = ["model.dim=8", "logger=wandb"]
    train(folder, words)
    assert commands == [[sys.executable, "-P", "-m", "tril.train", *words, f"hydra.run.dir={folder}"]]
    (folder / last).parent.mkdir()
    (folder / last).touch()
    train(folder, words)
    assert commands[1][3:] == ["tril.train", f"resume={folder}", "logger=wandb"]
    (folder / last).unlink()
    train(folder, words)  # without a checkpoint, nothing of it is of use
    assert commands[2] == commands[0] and not (folder / last).parent.exists()


def test_the_module_is_started_and_its_last_line_says_why_a_run_failed(tmp_path):
    train(tmp_path / "a", ["model.n_layers=0"])
    failure = json.loads((tmp_path / "a" / "failed.json").read_text())
    assert failure["status"] == 2 and "model.n_layers=0" in failure["message"]
