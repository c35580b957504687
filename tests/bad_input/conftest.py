"""Wrong input for every command: one line on stderr, exit status 2, nothing computed and nothing left behind."""

import importlib

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tril.data.tokenizer import TokenizerConfig
from tril.data.tokenizer import build as build_tokenizer
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel

FILES = "FILES"  # in arguments and messages: the folder of the fixture
EXPENSIVE = {  # what each command does with settings that it accepts
    "train": "tril.data.datamodule.TextDataModule.prepare_data",
    "certify": "tril.model.causality.certificate.certify_model",
    "referee": "tril.scripts.referee.train_pairs",
}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Files that no test changes: a checkpoint without a run, and what is not one."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), ())
    save(folder / "tiny.ckpt", LanguageModel(tiny_gpt(vocab_size=320), tokenizer))
    torch.save([1, 2], folder / "list.ckpt")
    torch.save({"state_dict": {}}, folder / "other.ckpt")
    (folder / "folder").mkdir()
    (folder / "run").mkdir()
    (folder / "run" / "config.yaml").write_text("a: [")
    (folder / "text.txt").write_text("some text\n" * 200)
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)))
    (folder / "latin1.txt").write_bytes("é".encode("latin1"))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def refused(files, tmp_path, monkeypatch):
    """A function that asserts that a command refuses its arguments."""

    def expensive(*_, **__):
        raise AssertionError("the settings were accepted")

    def check(command: str, arguments: str | tuple[str, ...], message: str) -> None:
        if command in EXPENSIVE:
            monkeypatch.setattr(EXPENSIVE[command], expensive)
        arguments = (arguments,) if isinstance(arguments, str) else arguments
        typed = [argument.replace(FILES, str(files)) for argument in arguments]
        main = importlib.import_module("tril.train" if command == "train" else f"tril.scripts.{command}").main
        done = call(main, *typed, cwd=tmp_path, TRIL_CACHE=str(files / "cache"))
        assert_refused(done, message.replace(FILES, str(files)).replace("CWD", str(tmp_path)))
        assert len(done.stderr.splitlines()) == 1, done.stderr  # nor any of the other line separators
        assert list(tmp_path.iterdir()) == []

    return check


def name_of(value: object) -> str:
    """The name of a case: its arguments."""
    text = " ".join(value) if isinstance(value, tuple) else str(value)
    return ascii(text)[1:-1][:60]
