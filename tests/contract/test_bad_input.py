"""A wrong command line and a damaged or foreign checkpoint end with status 2 and one line, and leave nothing behind.

A checkpoint from somebody else is data: opening it sends nothing, and writes nothing outside of its run's folder.
"""

import runpy
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.contract.bad_input import REFUSED
from tests.contract.harness import COMMANDS, ROOT, run, summary, unchanged

FILES = {"text.txt": b"some text\n" * 200, "short.txt": b"hi", "latin1.txt": "é\n".encode("latin1") * 200}
STEPS = ("trainer.max_steps=10", "~callbacks.causality")  # two more than those of `trained`


def edit(path: Path, **settings: object) -> None:
    """Changes settings in a checkpoint; without any, removes all."""
    content = torch.load(path, weights_only=True)
    content["tril"]["settings"] = content["tril"]["settings"] | settings if settings else {}
    torch.save(content, path)


@pytest.fixture(scope="module")
def names(once, run_of):
    """What the names in braces stand for."""
    source, gpt2 = run_of("data.tokenizer.kind=char"), run_of("model=gpt2")

    def write(folder: Path) -> None:
        (folder / "folder").mkdir()
        run("export", f"ckpt={gpt2}", "out=hf", cwd=folder).succeeded()
        shutil.copytree(folder / "hf", folder / "pickle")
        (folder / "pickle" / "model.safetensors").rename(folder / "pickle" / "pytorch_model.bin")
        for name, content in FILES.items():
            (folder / name).write_bytes(content)
        torch.save([1, 2], folder / "list.ckpt")
        shutil.copyfile(source / "checkpoints" / "last.ckpt", folder / "nothing.ckpt")
        edit(folder / "nothing.ckpt")

    folders = {"files": once("wrong", write), "run": source, "gpt2": gpt2}
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield folders | {"port": server.getsockname()[1]}


@pytest.mark.parametrize(("words", "setting", "limit"), REFUSED)
def test_it_is_refused_by_name_and_nothing_is_left(words, setting, limit, names, tmp_path):
    command, *words = shlex.split(words.format(**names))
    with unchanged(tmp_path, names["files"], names["run"]):
        done = run(command, *words, cwd=tmp_path)
    done.refused(setting.format(**names), limit.format(**names))


@pytest.mark.parametrize("word", ["ckpt=a\nb\u2028c\x1b[31m", "prompt=\udcff"])  # the last is no UTF-8
def test_an_error_is_one_line_whatever_was_given(word, names, tmp_path):
    done = run("sample", f"ckpt={names['run']}", word, cwd=tmp_path).refused()
    assert len(done.stderr.splitlines()) == 1 and done.stderr[:-1].isprintable()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_script_of_a_command_refuses_it(name, names, tmp_path, monkeypatch):
    words = next(words for words, *_ in REFUSED if words.split()[0] == name).format(**names)
    script = str(ROOT / ("train.py" if name == "train" else f"scripts/{name}.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *shlex.split(words)[1:]])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(script, run_name="__main__")


@pytest.fixture
def copied(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


FOREIGN = [  # settings in a checkpoint that could send something, write elsewhere, or load a class
    (("train", "heads", "evaluate"), "data.url", {"data.url": "http://127.0.0.1:{port}"}),
    (("train",), "logger.w", {"logger.w.project": "x", "logger.w.settings.base_url": "http://127.0.0.1:{port}"}),
    (("train",), "logger.csv", {"logger.csv._target_": "lightning.pytorch.loggers.CSVLogger", "logger.csv.name": "x"}),
    (("train",), "callbacks.samples.folder", {"callbacks.samples.folder": "."}),
    (("train",), "callbacks.mine", {"callbacks.mine._target_": "lightning.pytorch.callbacks.LearningRateMonitor"}),
]


@pytest.mark.parametrize(("commands", "setting", "settings"), FOREIGN)
def test_a_saved_setting_that_could_send_or_write_elsewhere_is_not_used(commands, setting, settings, copied, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for path in (copied / "checkpoints").glob("*.ckpt"):
            edit(path, **{key: value.format(port=port) for key, value in settings.items()})
        for command in commands:
            words = [f"resume={copied}", *STEPS] if command == "train" else [f"ckpt={copied}"]
            with unchanged(tmp_path):
                run(command, *words, cwd=tmp_path, WANDB_API_KEY="a" * 40).refused(setting)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_run_goes_on_unless_another_process_trains_it(copied, tmp_path):
    command = ("train", f"resume={copied}", *STEPS)
    with FileLock(copied / ".run.lock"):
        run(*command, cwd=tmp_path).refused("another process", copied)
    run(*command, cwd=tmp_path).succeeded()
    assert summary(copied)["steps"] == 10
