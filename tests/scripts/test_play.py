"""scripts/play.py as a user starts it: what it refuses, and a server that Ctrl-C ends."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused
from tests.model.test_checkpoint import language_model
from tests.scripts.play_server import REQUEST
from tril.model.checkpoint import save
from tril.scripts.play import main

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "play.py"
# Runs the script and prints at its end which of these packages it imported.
WATCHED = f"""
import atexit, runpy, sys
names = ("lightning", "datasets", "matplotlib", "scipy", "transformers")
atexit.register(lambda: print("imported:", *(name for name in names if name in sys.modules), flush=True))
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with two checkpoints."""
    path = tmp_path_factory.mktemp("play")
    torch.manual_seed(0)
    save(path / "outputs" / "run" / "checkpoints" / "best.ckpt", language_model())
    save(path / "other.ckpt", language_model(n_layers=1))
    return path


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["other=nowhere"], "nowhere does not exist; name a checkpoint file"),
        (["open=maybe"], "must be a valid boolean"),
        (["device=tpu"], "device=tpu is not available"),
    ],
    ids=str,
)
def test_mistakes_are_one_line_with_status_2(folder, arguments, message):
    assert_refused(call(main, "port=0", *arguments, cwd=folder), message)


def test_the_browser_opens_only_when_asked(folder, monkeypatch):
    from tril.scripts.playground import server

    opened, served = [], []
    monkeypatch.setattr("webbrowser.open", opened.append)

    class Server:
        def run(self, sockets):
            served.append(f"http://127.0.0.1:{sockets[0].getsockname()[1]}/")

    monkeypatch.setattr(server, "create_server", lambda models, prompt: Server())
    closed, shown = (call(main, "port=0", f"open={value}", "device=cpu", cwd=folder) for value in ("false", "true"))
    assert [closed.stdout, shown.stdout] == [f"{url}\n" for url in served] and opened == served[1:]
    assert closed.stderr == f"{Path('outputs/run/checkpoints/best.ckpt')} on cpu; Ctrl-C ends the server\n"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_ctrl_c_ends_the_server_also_while_it_streams(folder):
    command = [sys.executable, "-c", WATCHED, "port=0", "other=other.ckpt", "device=cpu"]
    options = {"cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "encoding": "utf-8"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)
    url = process.stdout.readline().strip()
    body = json.dumps(REQUEST | {"max_new_tokens": 500, "model": 1}).encode()
    request = urllib.request.Request(f"{url}generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline(), response.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0 and stdout == "imported:\n"
    names = f"{Path('outputs/run/checkpoints/best.ckpt')} and other.ckpt"
    assert stderr == f"{names} on cpu; Ctrl-C ends the server\n"
