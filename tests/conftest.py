"""Shared by the tests: a fixed seed, models with random weights, and a tolerance counted in roundings.

Tests marked `slow` repeat everyday tests on more cases. `pytest` deselects them, `pytest -m slow` runs them only.
"""

import gc
import hashlib
import http.server
import os
import random
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

# Read when numpy and torch are imported. Threads of several test processes share the cores, so none may spin while
# it waits.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pytest
import torch
from filelock import FileLock
from torch import Tensor

from tests.contract.harness import BARE, TINY, merged, newest_run, run, train
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.causality.model import randomize
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT, GPTConfig

WORDS = "a the red old small dog cat bird tree house sees finds likes near under and then when it sings runs".split()
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
    """With pytest-xdist, one process runs the tests that share a fixture of their module; see `once` for others.

    Slow tests start first, so that no process works long after the others.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
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


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A function: once("name", make) calls make(folder) in the first worker that asks, and returns the folder."""
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    base.mkdir(exist_ok=True)

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder, ready = base / name, base / f"{name}.ready"
        with FileLock(base / f"{name}.lock"):
            if not ready.exists():
                folder.mkdir()
                make(folder)
                ready.touch()
        return folder

    return once


@pytest.fixture(scope="session")
def texts(once) -> Path:
    """A pattern for 40 text files with 26 kB of sentences."""

    def write(folder: Path) -> None:
        chance = random.Random(0)
        for number in range(40):
            sentences = [" ".join(chance.choices(WORDS, k=chance.randint(4, 9))).capitalize() + "." for _ in range(18)]
            (folder / f"{number:02}.txt").write_text("\n".join(sentences) + "\n", "utf-8")

    return once("texts", write) / "*.txt"


@pytest.fixture(scope="session")
def run_of(once, texts) -> Callable[..., Path]:
    """A function: the folder of a finished run with these settings, which is trained once."""

    def run_of(*settings: object, base=BARE) -> Path:
        settings = (f"data.path={texts}", *settings)
        name = hashlib.sha256(repr((settings, base)).encode()).hexdigest()
        return newest_run(once(name, lambda cwd: run("train", *merged(base, *settings), cwd=cwd).succeeded()))

    return run_of


@pytest.fixture(scope="session")
def trained(run_of) -> Path:
    """The folder of a finished run of 8 steps with everything that is on by default."""
    return run_of(base=TINY)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400)), encoding="utf-8")
    return path


@pytest.fixture
def train_tiny(tmp_path, text):
    """A function that trains on `text`, in a folder of tmp_path, with a small loss.png."""

    def train_tiny(*settings, folder="run"):
        cache = f"data.cache_dir={tmp_path / 'cache'}"
        return train(f"data.path={text}", cache, f"hydra.run.dir={tmp_path / folder}", *settings)

    return train_tiny


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


def training_module(model: GPT, steps: int = 8, optim=None, *, document_eot: int | None = None, compile=False):
    """The Lightning module of a run of so many steps on a text of one document, with a byte for each target."""
    from tril.model.training.module import TrainingModule
    from tril.model.training.optim import OptimConfig

    part = SimpleNamespace
    tokenizer, text = (
        build(TokenizerConfig(kind="byte")),
        part(val_bytes=float, documents=lambda _: np.zeros(10_000, int)),
    )
    source = part(document_mask=document_eot is not None, tokenizer=TokenizerConfig(kind="byte"), prompt="")
    data = part(text=text, source=source, tokenizer=tokenizer, meta={"eot_id": document_eot, "fingerprint": "text"})
    trainer, hardware = part(max_steps=steps), part(compile=compile)
    return TrainingModule(part(optim=optim or OptimConfig(), trainer=trainer, hardware=hardware), model, data, {})


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that torch.compile captures; code generation would take a minute."""
    captured, compiler = [], torch.compile
    torch._dynamo.reset()
    backend = lambda graph, _: captured.append(graph) or graph.forward  # noqa: E731
    compile = lambda function, **options: compiler(function, **options | {"backend": backend, "fullgraph": True})  # noqa: E731
    monkeypatch.setattr(torch, "compile", compile)
    return captured


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
