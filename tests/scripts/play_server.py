"""A running server of play.py for tests, and a client that reads its answers line by line."""

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator

from tril.scripts.playground.server import LOOPBACK, PlayModel, create_server, listen

REQUEST = {"model": 0, "prompt": "def ", "max_new_tokens": 6, "temperature": 0.8, "top_k": 50, "top_p": None, "seed": 3}
REQUEST |= {"remove_heads": []}


@contextlib.contextmanager
def served(*lms, prompt="", names=("model 0", "model 1")) -> Iterator:
    """The server of these models in a thread; its port is `server.port`. At the end it stops, which is checked."""
    models = [PlayModel(name, lm) for name, lm in zip(names, lms, strict=False)]
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


def options(**values) -> dict:
    """The same settings for `LanguageModel.generate`."""
    request = REQUEST | values
    return {name: request[name] for name in ("max_new_tokens", "temperature", "top_k", "top_p", "seed")}
