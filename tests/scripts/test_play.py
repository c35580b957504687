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
REFUSED = [  # values of a request, its headers, and a part of the answer
    ({"max_new_tokens": 501}, {}, "max_new_tokens=501 must be less than or equal to 500"),
    ({"prompt": "\udc80"}, {}, "'utf-8' codec can't encode character"),
    ({"remove_heads": ["L0H4"]}, {}, "the model has no head 'L0H4'; with 2 layers of 4 heads, use L0H0 to L1H3"),
    ({"model": 2}, {}, "model=2 must be below the number of models, 2"),
    ({}, {"Content-Type": "text/html"}, "the content type application/json"),
    *(({}, {"Host": host}, "Invalid host") for host in ("evil.example", "127.0.0.1.evil.example", "")),
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


def test_the_models_and_the_files_of_the_page_are_served_with_a_policy_and_what_is_wrong_is_refused(server, lms):
    answer, own = json.loads(send(server, "GET", "/models").read()), f"127.0.0.1:{server.port}"
    models = [
        {"name": f"model {i}", "parameters": lm.model.n_parameters(), "layers": 2 - i, "heads": 4, "context": 12}
        for i, lm in enumerate(lms)
    ]
    assert answer == {"prompt": "def ", "repetition_penalty": 1.0, "models": models}
    for path, file in FILES.items():
        response = send(server, "GET", path)
        assert response.status == 200 and response.read() == file.read_bytes()
        policy = response.getheader("Content-Security-Policy")
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    others = ("GET", "/server.py"), ("GET", "/../server.py"), ("GET", "/docs"), ("OPTIONS", "/generate")
    assert [send(server, *each).status for each in others] == [
        404,
        404,
        404,
        405,
    ]  # 405: a browser asks for another page
    for values, headers, message in REFUSED:
        response = send(server, "POST", "/generate", REQUEST | values, **headers)
        text = response.read().decode()
        assert response.status == 400 and message in text and ("Host" in headers or [*json.loads(text)] == ["error"])
    assert send(server, "GET", "/models", Host="evil.example").status == 400
    for body in ({"model": 0}, [1], b"{", b"\xff", b"[" * 100_000):
        assert send(server, "POST", "/generate", body).status == 400
    for host in (own, f"localhost:{server.port}"):
        assert send(server, "POST", "/generate", REQUEST, Host=host).status == 200


def test_simultaneous_answers_are_the_samples_of_the_same_settings(server, lms):
    more = {"max_new_tokens": 20, "temperature": 1.0}
    asked = [(0, "a", ()), (0, "bcd", (1, 3)), (1, "efghij", ()), (0, "k", ())]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = [
            pool.submit(generate, server, model=i, prompt=text, remove_heads=[f"L0H{h}" for h in heads], **more)
            for i, text, heads in asked
        ]
    for (model, prompt, removed), answer in zip(asked, started, strict=True):
        given, tokens = answer.result()
        assert "".join(token["text"] for token in given) == prompt
        for token, alone in zip(tokens, known(lms[model], prompt, removed, **more), strict=True):
            assert [token[key] for key in ("id", "name", "text")] == [alone.id, alone.name, alone.text]
            assert token["n_dropped"] == alone.n_dropped and token["ended"] == (alone.id == lms[model].eot_id)
            assert token["candidates"] == [candidate._asdict() for candidate in alone.candidates]
            weights = np.frombuffer(base64.b64decode(token["attention"]), "<f2").astype(np.float32)  # as the page does
            np.testing.assert_allclose(weights, alone.attention.flatten(), rtol=2.0**-11, atol=2.0**-25)


def test_a_closed_connection_and_the_end_of_the_server_end_a_generation_and_what_is_not_finite_is_null():
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
        n, response = len(times), send(server, "POST", "/generate", REQUEST | {"max_new_tokens": 500})
        response.readline(), response.readline()
    assert len(times) - n < 250
    assert all(c["model"] is None and c["drawn_from"] is None for c in tokens[0]["candidates"])


HOSTILE = "</script><img src=x onerror=alert(1)>\n&lt;b\t\x07 é{{7*7}}" + "x" * 300
SHOWN = "</script><img src=x onerror=alert(1)>↵\n&lt;b→␇ ⋯é{{7*7}}" + "x" * 300  # ⋯: the first byte of é


def percent(p):
    return "–" if p is None else "0" if p == 0 else "< 0.1%" if p < 0.001 else f"{100 * p:.1f}%"


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
    lms, steps, go_on = [byte_model(), byte_model(n_layers=1)], [], threading.Event()
    lms[1].eot_id = -1  # nothing else ends the text
    go_on.set()

    def step(*_):
        steps.append(1)
        assert len(steps) < 9 or go_on.wait(60)

    lms[1].model.norm.register_forward_hook(step)
    values = {"max_new_tokens": 12, "temperature": 0.0, "top_k": None, "repetition_penalty": 1.0, "seed": 0}
    whole, other = (known(lm, HOSTILE, **values) for lm in lms)
    without = known(lms[0], HOSTILE, [1], **values)
    first = next(t for t in range(12) if whole[t].id != without[t].id)
    with chromium(tmp_path) as driver, served(*lms, prompt=HOSTILE) as server:
        resize(driver, 400, 800, dark=True, touch=True)
        page = PlayPage(driver)
        driver.get(f"http://127.0.0.1:{server.port}/")
        page.until("panes.length > 0")
        page.generate(temperature="11", max_new_tokens=12)
        assert page.texts("#error") == ["temperature=11 must be less than or equal to 10"] and page.ids() == []
        messages = [entry["message"] for entry in driver.get_log("browser")]  # the browser's own, on status 400
        assert len(messages) == 2 and all("/generate" in message and "400" in message for message in messages)
        page.js("report(arguments[0])", HOSTILE)
        assert page.texts("#error") == [HOSTILE]
        page.generate(temperature="0", top_k="")
        assert "".join(page.texts(".given")[: len(HOSTILE.encode())]) == SHOWN and page.texts("#error") == [""]
        assert page.js("return [document.images.length, document.scripts.length]") == [0, 3]
        assert [page.ids(0), page.ids(1)] == [[token.id for token in tokens] for tokens in (whole, other)]

        page.js("document.querySelector('#generate').focus()")
        page.press("TAB", "END", "HOME", "ARROW_RIGHT", "ARROW_LEFT", "ENTER")  # past Stop, which is disabled
        page.press("TAB", "ARROW_RIGHT", "ENTER")  # the switches: L0H0, L0H1
        page.until("$('stop').disabled")
        assert page.ids() == [token.id for token in without]
        assert page.attributes(".strip.off", "title") == ["L0H1"]
        assert page.texts(".whole q") == ["".join(token.text for token in whole[first:])]
        before, cells = {c.id: c.drawn_from for c in whole[0].candidates}, page.texts(".candidates tbody td")
        columns = [(percent(c.model), percent(before.get(c.id))) for c in without[0].candidates]  # of the pinned token
        assert list(zip(cells[2::4], cells[3::4], strict=True))[: len(columns)] == columns
        assert page.texts(".candidates .drawn th")[0] == f"▸{without[0].name} (drawn)"
        page.press("TAB", "ARROW_RIGHT", "ENTER")  # the strips: L0H0, L0H1
        assert page.attributes(".strip[aria-pressed=true]", "title")[:1] == ["L0H1"]
        page.generate(".restore")
        assert page.ids() == [token.id for token in whole]
        tap(driver, page.find(".token[data-token='3']"))
        assert page.js("return panes[0].pinned") == 3
        assert page.js("return [innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [400, True]
        assert not any(page.all("section, form, .text, table", "e.scrollWidth > e.clientWidth"))

        steps.clear()
        go_on.clear()  # the model waits for Stop, however slow the browser is
        page.js("$('max_new_tokens').value = 500")
        page.find("#generate").click()
        page.until("panes[1].tokens.length > 2")
        page.find("#stop").click()
        go_on.set()
        n = len(page.ids(1))
        assert page.texts(".status")[1] == f"{n} tokens, stopped" and n < 500
        page.find("#generate").click()
        page.generate(max_new_tokens=3)  # in the place of a running one
        assert len(page.ids(1)) == 3 and len(steps) < 900  # two complete runs take 1,000 steps
        assert driver.get_log("browser") == []
