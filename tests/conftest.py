"""Shared by the tests: a fixed seed, models with random weights, and a tolerance counted in roundings.

Tests marked `slow` repeat everyday tests on more cases. `pytest` deselects them, `pytest -m slow` runs them only.
"""

import gc
import http.server
import os
import threading
from http import HTTPStatus
from typing import Literal, get_args, get_origin, get_type_hints

# Read when numpy and torch are imported. Threads of several test processes share the cores, so none may spin while
# it waits.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from torch import Tensor

from tests.contract.conftest import once, run_of, texts, trained  # noqa: F401  fixtures of both
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.causality.model import randomize
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, GPTConfig

BACKENDS = ("stacked", "explicit", "fused")
NANO_PARTS = {"key_offset": True, "embed_skip": True, "value_embed": True}  # of model=nano, which a plain GPT lacks

# The valid values of each field of GPTConfig that has a fixed set of them
MODEL_CHOICES = {
    name: get_args(hint) for name, hint in get_type_hints(GPTConfig).items() if get_origin(hint) is Literal
}

torch.set_num_threads(1)  # the tensors of the tests are too small to be split between threads


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:Anomaly Detection has been enabled:UserWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With pytest-xdist, one process runs the tests that share a fixture of their module; see `once` for others."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        shares = any(each[-1].scope == "module" for each in fixtures)
        if shares and item.path.parent.name != "contract" and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def pytest_collection_finish():
    gc.freeze()  # a collection would look at everything that was imported


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture
def configure(tmp_path, text, monkeypatch):
    """A function that returns the settings of a tiny run on `text`, in a folder of tmp_path.

    The runs of the test write a small loss.png; `tests/test_train.py` and runs in other processes draw the real one.
    """
    from tests.contract.harness import DRAWN_BY, small_picture
    from tests.runs import typed

    monkeypatch.setattr(DRAWN_BY, small_picture)

    def configure(*overrides, folder="run"):
        return typed(
            f"data.path={text}",
            f"data.cache_dir={tmp_path / 'cache'}",
            f"hydra.run.dir={tmp_path / folder}",
            *overrides,
        )

    return configure


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


def tiny_gpt(**choices) -> GPT:
    """A GPT with all weights random, in evaluation mode."""
    shape = {"vocab_size": 31, "context_length": 12, "n_layers": 2, "dim": 32, "n_heads": 4}
    return randomize(GPT(GPTConfig(**{**shape, **NANO_PARTS, **choices}))).eval()


def byte_model(**choices) -> LanguageModel:
    """The same with a token for each byte."""
    return LanguageModel(tiny_gpt(**{"vocab_size": 257, **choices}), build(TokenizerConfig(kind="byte")))


def assert_close(actual: Tensor, expected: Tensor, *, roundings: float = 64) -> None:
    """Same shape, and each element within `roundings` machine epsilons of `actual`'s dtype, relative to the largest
    expected value.

    64 is about what a chain of sums of ten to a hundred products accumulates.
    """
    assert actual.shape == expected.shape
    scale = max(1.0, expected.abs().max().item())
    limit = roundings * torch.finfo(actual.dtype).eps * scale
    error = (actual.double() - expected.double()).abs().max().item()
    assert error <= limit, f"largest difference {error:.3g}, allowed {limit:.3g}"  # a NaN fails as well
