"""A running server of play.py, a client that reads its answers line by line, and its page in a browser."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator

from tests.browser import Page
from tril.model.heads.live import live_tokens
from tril.scripts.playground.server import LOOPBACK, PlayModel, create_server, listen

SAMPLING = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 50, "top_p": None, "seed": 3}
REQUEST = {"model": 0, "prompt": "def ", "remove_heads": [], **SAMPLING}


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
    body = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, headers)
    return connection.getresponse()


def generate(server, **values) -> tuple[list, list]:
    """The tokens of the prompt, and the new ones."""
    response = send(server, "POST", "/generate", REQUEST | values)
    assert response.status == 200, response.read()
    prompt, *tokens = [json.loads(line) for line in response]
    return prompt["prompt"], tokens


def known(lm, prompt="def ", gate=None, **values) -> list:
    """The tokens that the server sends, computed here."""
    return list(live_tokens(lm, prompt, head_gate=gate, **SAMPLING | values))


class PlayPage(Page):
    """The page with temperature 0.8, top-k 50, seed 0 and 12 new tokens, and other values of fields."""

    def open(self, server, **fields):
        self.driver.get(f"http://127.0.0.1:{server.port}/")
        self.until("panes.length > 0")
        self.fill(**{"max_new_tokens": 12, **fields})
        return self

    def until(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, poll_frequency=0.02).until(lambda _: self.js(f"return {condition}"))

    def fill(self, **fields):
        for name, value in fields.items():
            self.js("$(arguments[0]).value = arguments[1]", name, value)

    def click(self, selector):
        """Clicks, and waits for the text that follows."""
        self.find(selector).click()
        self.until("$('stop').disabled")
        return self

    def generate(self):
        return self.click("#generate")

    def pane(self, number, expression):
        return self.js(f"return panes[{number}].{expression}")

    def ids(self, number=0):
        return self.pane(number, "tokens.map((t) => t.id)")

    def token(self, t):
        return self.find(f".token[data-token='{t}']")
