"""scripts/play.py: the command, and its HTTP server over real connections: answers, refusals, and lost readers."""

import base64
import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.calls import call
from tests.conftest import byte_model
from tests.scripts.play import REQUEST, SAMPLING, generate, known, send, served
from tril.model.checkpoint import save
from tril.scripts.play import main
from tril.scripts.playground import server as server_module
from tril.scripts.playground.server import FILES

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "play.py"
BEST = Path("outputs/run/checkpoints/best.ckpt")
# Runs the script and prints at its end which of these packages it imported.
WATCHED = f"""
import atexit, runpy, sys
names = ("lightning", "datasets", "matplotlib", "scipy", "transformers")
atexit.register(lambda: print("imported:", *(name for name in names if name in sys.modules), flush=True))
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def lms():
    torch.manual_seed(0)
    return [byte_model(), byte_model(n_layers=1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lms):
    """A working directory with two checkpoints."""
    path = tmp_path_factory.mktemp("play")
    save(path / BEST, lms[0])
    save(path / "other.ckpt", lms[1])
    return path


@pytest.fixture(scope="module")
def server(lms):
    with served(*lms, prompt="def ") as server:
        yield server


def error_of(response):
    answer = json.loads(response.read())
    assert response.status == 400 and list(answer) == ["error"] and "\n" not in answer["error"]
    return answer["error"]


def weights_of(token):
    """As the page decodes them: little-endian float16."""
    return np.frombuffer(base64.b64decode(token["attention"]), "<f2").astype(np.float32)


def test_the_browser_opens_only_when_asked(folder, monkeypatch):
    opened, served = [], []
    monkeypatch.setattr("webbrowser.open", opened.append)

    class Server:
        def run(self, sockets):
            served.append(f"http://127.0.0.1:{sockets[0].getsockname()[1]}/")

    monkeypatch.setattr(server_module, "create_server", lambda models, prompt: Server())
    closed, shown = (call(main, "port=0", f"open={value}", "device=cpu", cwd=folder) for value in ("false", "true"))
    assert [closed.stdout, shown.stdout] == [f"{url}\n" for url in served] and opened == served[1:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for another process")
def test_ctrl_c_ends_the_server_also_while_it_streams(folder, lms):
    settings = {"max_new_tokens": 500, "temperature": 0.0}
    assert len(known(lms[1], **settings)) == 500
    command = [sys.executable, "-c", WATCHED, "port=0", "other=other.ckpt", "device=cpu"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    process = subprocess.Popen(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams)
    url = process.stdout.readline().strip()
    body = json.dumps(REQUEST | settings | {"model": 1}).encode()
    request = urllib.request.Request(f"{url}generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        response.readline(), response.readline()
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
        with contextlib.suppress(http.client.IncompleteRead):
            assert sum(1 for _ in response) < 400
    assert process.returncode == 0 and stdout == "imported:\n"
    assert stderr == f"{BEST} and other.ckpt on cpu; Ctrl-C ends the server\n"


def test_the_models_and_the_files_of_the_page_are_served_with_a_policy_and_nothing_else(server, lms):
    answer = json.loads(send(server, "GET", "/models").read())
    models = [
        {"name": f"model {i}", "parameters": lm.model.n_parameters(), "layers": 2 - i, "heads": 4, "context": 12}
        for i, lm in enumerate(lms)
    ]
    assert answer == {"prompt": "def ", "models": models}
    for path, file in FILES.items():
        response = send(server, "GET", path)
        assert response.status == 200 and response.read() == file.read_bytes()
        policy = response.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    for path in ("/server.py", "/../server.py", "/page/", "/docs"):
        assert send(server, "GET", path).status == 404, path


@pytest.mark.parametrize(("number", "removed"), [(0, []), (1, ["L0H1", "L0H3"])])
def test_a_stream_is_the_sample_of_the_same_settings(server, lms, number, removed):
    lm, gate, more = lms[number], torch.ones(2 - number, 4), {"max_new_tokens": 20}
    gate[0, [1, 3]] = 0
    gate = gate if removed else None
    given, tokens = generate(server, model=number, remove_heads=removed, **more)
    text = "".join(token["text"] for token in (*given, *tokens))
    assert text == "def " + lm.generate("def ", head_gate=gate, **SAMPLING | more)
    expected = known(lm, gate=gate, **more)
    assert len(tokens) == len(expected) > 12
    for token, alone in zip(tokens, expected, strict=True):
        assert [token[key] for key in ("id", "name", "text")] == [alone.id, alone.name, alone.text]
        assert token["dropped"] == alone.n_dropped and token["ended"] == (alone.id == lm.eot_id)
        assert token["candidates"] == [candidate._asdict() for candidate in alone.candidates]
        np.testing.assert_allclose(weights_of(token), alone.attention.flatten(), rtol=2.0**-11, atol=2.0**-25)


def test_simultaneous_answers_of_one_model_do_not_mix(server, lms):
    texts, hot = ["a", "bcd", "efghij", "k"], {"max_new_tokens": 20, "temperature": 1.0}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda text: generate(server, prompt=text, **hot), texts))
    for text, (given, tokens) in zip(texts, answers, strict=True):
        expected = known(lms[0], text, **hot)
        assert [token["id"] for token in tokens] == [token.id for token in expected] and len(given) == len(text)
        for token, alone in zip(tokens, expected, strict=True):
            np.testing.assert_allclose(weights_of(token), alone.attention.flatten(), rtol=2.0**-10, atol=1e-6)


REFUSED = [
    ({"max_new_tokens": 501}, "max_new_tokens=501 must be less than or equal to 500"),
    ({"top_k": "not a number"}, "top_k='not a number' must be a valid integer"),
    ({"prompt": "x" * 20_001}, "the prompt has 20001 characters; use at most 20000"),
    ({"prompt": "x" * 2**20}, "the request has more than 1048576 bytes"),
    ({"prompt": "\udc80"}, "'utf-8' codec can't encode character"),
    ({"remove_heads": ["L0H4"]}, "the model has no head 'L0H4'; with 2 layers of 4 heads, use L0H0 to L1H3"),
    ({"model": 2}, "model=2 must be below the number of models, 2"),
]


def test_a_wrong_request_is_one_line(server):
    for values, message in REFUSED:
        assert error_of(send(server, "POST", "/generate", REQUEST | values)).startswith(message)
    for body in ({"model": 0}, [1], b"{", b"\xff"):
        assert error_of(send(server, "POST", "/generate", body))
    assert send(server, "GET", "/generate").status == 405


def test_other_pages_are_refused(server):
    own = f"127.0.0.1:{server.port}"
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", ""):
        for method, path in (("GET", "/models"), ("POST", "/generate")):
            assert send(server, method, path, REQUEST, Host=host).status == 400, host
    for origin in ("http://evil.example", "null", f"https://{own}", f"http://127.0.0.1:{server.port + 1}"):
        assert "is another page" in error_of(send(server, "POST", "/generate", REQUEST, Origin=origin))
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert "content type" in error_of(send(server, "POST", "/generate", REQUEST, Content_Type=kind))
    for host in (own, f"localhost:{server.port}"):
        assert send(server, "POST", "/generate", REQUEST, Host=host, Origin=f"http://{host}").status == 200


def test_a_closed_connection_ends_its_generation_and_weights_that_are_not_finite_reach_the_page_as_null():
    lm, times = byte_model(), []
    lm.eot_id = -1  # nothing else ends the text
    lm.model.norm.register_forward_hook(lambda *_: (time.sleep(0.01), times.append(time.monotonic()))[1])
    with served(lm) as server:
        response = send(server, "POST", "/generate", REQUEST | {"max_new_tokens": 500})
        for _ in range(4):
            response.readline()
        response.close()
        deadline = time.monotonic() + 20
        while time.monotonic() - times[-1] < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert 3 <= len(times) < 250  # 500 steps without the end
        torch.nn.init.constant_(lm.model.norm.weight, float("nan"))
        _, tokens = generate(server, max_new_tokens=2)  # the server still serves
    assert all(c["model"] is None and c["drawn_from"] is None for c in tokens[0]["candidates"])
