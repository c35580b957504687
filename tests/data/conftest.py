"""A local web server in place of the internet."""

import http.server
import threading
from http import HTTPStatus

import pytest


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.command, self.path))
        content, headers = self.server.files.get(self.path.partition("?")[0], (None, {}))
        self.send_response(HTTPStatus.NOT_FOUND if content is None else HTTPStatus.OK)
        for name, value in {"Content-Length": str(len(content or b"")), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """`files` maps a path to (content, headers), other paths give 404; `requests` lists (method, path)."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.files, server.requests = {}, []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """`server` in place of the Hugging Face hub; `hub(url)` uses another address."""
    from huggingface_hub import constants

    def connect(url):
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    connect(server.url)
    return connect
