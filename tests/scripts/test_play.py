"""scripts/play.py: the command, its HTTP server over real connections, and its page in a browser."""

import base64
import concurrent.futures
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.browser import Page, chromium, resize, tap
from tests.conftest import byte_model
from tests.contract.harness import run
from tril.model.checkpoint import save
from tril.model.heads.live import live_tokens
from tril.scripts.playground.server import FILES, LOOPBACK, PlayModel, create_server, listen

SAMPLING = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 50, "top_p": None, "repetition_penalty": 1.1, "seed": 3}
REQUEST = {"model": 0, "prompt": "def ", "remove_heads": [], **SAMPLING}
HOSTS = ("evil.example", "127.0.0.1.evil.example", "")
REFUSED = [  # a body or values of a request, its headers, and what the answer names
    ({"max_new_tokens": 501}, {}, "max_new_tokens=501"),
    ({"prompt": "\udc80"}, {}, "surrogates"),
    ({"remove_heads": ["L0H4"]}, {}, "L0H4"),
    ({"model": 2}, {}, "model=2"),
    ({}, {"Content-Type": "text/html"}, "application/json"),
    *(({}, {"Host": host}, "Invalid host") for host in HOSTS),
    *((body, {}, "error") for body in ([1], b"{", b"\xff", b"[" * 100_000)),
]


@contextlib.contextmanager
def served(*lms, prompt="") -> Iterator:
    """The server of these models in a thread; its port is `server.port`. At the end it stops, which is checked."""
    models = [PlayModel(f"model {i}", lm) for i, lm in enumerate(lms)]
    with listen(0) as listener:
        server = create_server(models, prompt)
        server.port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield server
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def send(server, method, path, body=None, **headers) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=60)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
    return connection.getresponse()


def generate(server, **values) -> tuple[list, list]:
    """The tokens of the prompt, and the new ones."""
    response = send(server, "POST", "/generate", REQUEST | values)
    assert response.status == 200, response.read()
    prompt, *tokens = [json.loads(line) for line in response]
    return prompt["prompt"], tokens


def known(lm, prompt="def ", removed=(), **values) -> list:
    """The tokens that the server sends, computed here; `removed` are heads of the first layer."""
    gate = torch.ones(2, 4)
    gate[0, list(removed)] = 0
    return list(live_tokens(lm, prompt, head_gate=gate if removed else None, **SAMPLING | values))


@pytest.fixture(scope="module")
def lms():
    torch.manual_seed(0)
    return [byte_model(), byte_model(n_layers=1)]


@pytest.fixture(scope="module")
def server(lms):
    with served(*lms, prompt="def ") as server:
        yield server


def test_the_address_is_printed(tmp_path, lms, monkeypatch):
    save(tmp_path / "outputs/run/checkpoints/best.ckpt", lms[0])
    ports = []
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: ports.append(sockets[0].getsockname()[1]))
    done = run("play", "port=0", "device=cpu", cwd=tmp_path)
    assert done.stdout == f"http://127.0.0.1:{ports[0]}/\n"


def test_the_models_are_served(server, lms):
    answer = json.loads(send(server, "GET", "/models").read())
    assert (answer["prompt"], answer["repetition_penalty"]) == ("def ", 1.0)
    sizes = [(model["name"], model["layers"], model["heads"], model["context"]) for model in answer["models"]]
    assert sizes == [("model 0", 2, 4, 12), ("model 1", 1, 4, 12)]
    assert [model["parameters"] for model in answer["models"]] == [lm.model.n_parameters() for lm in lms]


@pytest.mark.parametrize("path", FILES)
def test_the_files_of_the_page_are_served_with_a_policy(path, server):
    response = send(server, "GET", path)
    assert response.status == 200 and response.read() == FILES[path].read_bytes()
    policy = response.getheader("Content-Security-Policy")
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize(("values", "headers", "named"), REFUSED)
def test_a_wrong_request_is_refused(values, headers, named, server):
    response = send(server, "POST", "/generate", REQUEST | values if isinstance(values, dict) else values, **headers)
    assert response.status == 400 and named in response.read().decode()


def test_no_other_path_is_served_and_no_other_page_is_answered(server):
    others = [("GET", "/server.py"), ("GET", "/../server.py"), ("GET", "/docs"), ("OPTIONS", "/generate")]
    assert [send(server, *each).status for each in others] == [404, 404, 404, 405]
    assert send(server, "GET", "/models", Host="evil.example").status == 400
    assert send(server, "POST", "/generate", REQUEST, Host=f"localhost:{server.port}").status == 200


def test_simultaneous_answers_are_the_samples_of_the_same_settings(server, lms):
    asked = [(0, "a", ()), (0, "bcd", (1, 3)), (1, "efghij", ()), (0, "k", ())]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        requests = [
            {"model": i, "prompt": text, "remove_heads": [f"L0H{h}" for h in removed]} for i, text, removed in asked
        ]
        answers = list(pool.map(lambda values: generate(server, **values), requests))
    for (model, prompt, removed), (given, tokens) in zip(asked, answers, strict=True):
        assert "".join(token["text"] for token in given) == prompt
        for token, alone in zip(tokens, known(lms[model], prompt, removed), strict=True):
            assert [token[key] for key in ("id", "name", "text")] == [alone.id, alone.name, alone.text]
            assert token["candidates"] == [candidate._asdict() for candidate in alone.candidates]
            weights = np.frombuffer(base64.b64decode(token["attention"]), "<f2").astype(np.float32)  # as the page does
            np.testing.assert_allclose(weights, alone.attention.flatten(), rtol=2.0**-11, atol=2.0**-25)


def test_a_closed_connection_and_the_end_of_the_server_end_a_generation():
    lm, times = byte_model(), []
    lm.eot_id = -1  # nothing else ends the text
    lm.model.norm.register_forward_hook(lambda *_: (time.sleep(0.01), times.append(time.monotonic()))[1])
    endless = REQUEST | {"max_new_tokens": 500}
    with served(lm) as server:
        response = send(server, "POST", "/generate", endless)
        response.readline(), response.close()
        while not times or time.monotonic() - times[-1] < 0.5:
            assert len(times) < 250
        n = len(times)
        send(server, "POST", "/generate", endless).readline()
    assert len(times) - n < 250


def test_a_probability_that_is_not_finite_is_null():
    lm = byte_model()
    torch.nn.init.constant_(lm.model.norm.weight, float("nan"))
    with served(lm) as server:
        _, (token,) = generate(server, max_new_tokens=1)
    assert all(candidate["model"] is None for candidate in token["candidates"])


HOSTILE = "</script><img src=x onerror=alert(1)>\n&lt;b\t\x07 é{{7*7}}" + "x" * 300
SHOWN = "</script><img src=x onerror=alert(1)>↵\n&lt;b→␇ ⋯é{{7*7}}" + "x" * 300  # ⋯: the first byte of é


class PlayPage(Page):
    def until(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, poll_frequency=0.02).until(lambda _: self.js(f"return {condition}"))

    def generate(self, selector="#generate", **fields):
        """Fills in fields and clicks, and waits for the text that follows."""
        for name, value in fields.items():
            self.js("$(arguments[0]).value = arguments[1]", name, value)
        self.find(selector).click()
        self.until("$('stop').disabled")

    def ids(self, number=0):
        return self.js(f"return panes[{number}].tokens.map((t) => t.id)")


def test_the_page_in_a_browser(tmp_path):
    """Two models on a small dark touch screen: a refusal, hostile text, a head switched off by keyboard, and Stop."""
    lms, go_on = [byte_model(), byte_model(n_layers=1)], threading.Event()
    lms[1].eot_id = -1  # nothing else ends the text
    lms[1].model.norm.register_forward_hook(lambda *_: None if go_on.is_set() else time.sleep(0.1))
    go_on.set()
    values = {"max_new_tokens": 12, "temperature": 0.0, "top_k": None, "repetition_penalty": 1.0, "seed": 0}
    whole, other, without = (
        known(lms[0], HOSTILE, **values),
        known(lms[1], HOSTILE, **values),
        known(lms[0], HOSTILE, [1], **values),
    )
    first = next(t for t in range(12) if whole[t].id != without[t].id)
    with chromium(tmp_path) as driver, served(*lms, prompt=HOSTILE) as server:
        resize(driver, 400, 800, dark=True, touch=True)
        page = PlayPage(driver)
        driver.get(f"http://127.0.0.1:{server.port}/")
        page.until("panes.length > 0")
        page.generate(temperature="11", max_new_tokens=12)
        assert "temperature=11" in page.texts("#error")[0] and page.ids() == []
        driver.get_log("browser")  # the browser's own messages, on status 400
        page.generate(temperature="0", top_k="")
        assert "".join(page.texts(".given")[: len(HOSTILE.encode())]) == SHOWN and page.texts("#error") == [""]
        assert page.js("return [document.images.length, document.scripts.length]") == [0, 3]
        assert [page.ids(0), page.ids(1)] == [[token.id for token in tokens] for tokens in (whole, other)]

        page.js("document.querySelector('#generate').focus()")
        page.press("TAB", "TAB", "ARROW_RIGHT", "ENTER")  # past the text, to the switches: L0H0, L0H1
        page.until("$('stop').disabled")
        assert page.ids() == [token.id for token in without]
        assert page.attributes(".strip.off", "title") == ["L0H1"]
        assert page.texts(".whole q") == ["".join(token.text for token in whole[first:])]
        page.generate(".restore")
        assert page.ids() == [token.id for token in whole]
        tap(driver, page.find(".token[data-token='3']"))
        assert page.js("return panes[0].pinned") == 3
        assert not any(page.all("section, form, .text, table", "e.scrollWidth > e.clientWidth"))

        go_on.clear()  # the model is slow until Stop
        page.js("$('max_new_tokens').value = 500")
        page.find("#generate").click()
        page.until("panes[1].tokens.length > 2")
        page.find("#stop").click()
        go_on.set()
        assert len(page.ids(1)) < 500 and "stopped" in page.texts(".status")[1]
        assert driver.get_log("browser") == []
