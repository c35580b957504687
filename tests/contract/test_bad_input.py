"""A wrong command line and a damaged or foreign folder end with status 2 and one line, and leave nothing behind.

A run folder from somebody else is data: opening it sends nothing, and writes nothing outside of it.
"""

import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from omegaconf import OmegaConf

from tests.contract.bad_input import REFUSED
from tests.contract.harness import COMMANDS, ROOT, run, summary, unchanged

ROWS = [(command, *row) for command, rows in REFUSED.items() for row in rows]
BOMB = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 25)])
CONTENT = {  # of files; those with a folder replace a file of a run
    "text.txt": b"some text\n" * 200,
    "empty.txt": b"",
    "short.txt": b"hi",
    "latin1.txt": "é\n".encode("latin1") * 200,
    "lines.jsonl": b'{"text": "a"}\n{"text": \n',
    "field.jsonl": b'{"body": "a"}\n' * 9,
    "unclosed/config.yaml": b"a: [",
    "brackets/config.yaml": b"[" * 3000,
    "recursion/config.yaml": b"a: &a [*a]",
    "aliases/config.yaml": BOMB.encode(),
    "bytes/config.yaml": b"\x00\xff",
}
STEPS = ("trainer.max_steps=10", "~callbacks.causality")  # two more than those of `folder`


@pytest.fixture(scope="module")
def names(once, run_of):
    """What the names in braces stand for."""
    source, gpt2 = run_of("data.tokenizer.kind=char"), run_of("model=gpt2")

    def write(folder: Path) -> None:
        (folder / "folder").mkdir()
        run("export", f"ckpt={gpt2}", "out=hf", cwd=folder).succeeded()
        shutil.copytree(folder / "hf", folder / "pickle")
        (folder / "pickle" / "model.safetensors").rename(folder / "pickle" / "pytorch_model.bin")
        for name, content in CONTENT.items():
            if "/" in name:
                shutil.copytree(source, (folder / name).parent)
            (folder / name).write_bytes(content)
        torch.save([1, 2], folder / "list.ckpt")
        shutil.copyfile(source / "checkpoints" / "last.ckpt", folder / "alone.ckpt")
        (folder / "half.ckpt").write_bytes((source / "checkpoints" / "last.ckpt").read_bytes()[:9000])

    folders = {"files": once("wrong", write), "run": source, "gpt2": gpt2}
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield folders | {"port": server.getsockname()[1]}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " ".join(row[:2]))
def test_it_is_refused(row, names, tmp_path):
    command, words, *parts = (each.format(**names) for each in row)
    with unchanged(tmp_path, names["files"], names["run"]):
        done = run(command, *shlex.split(words), cwd=tmp_path)
    done.refused(*parts)


def test_an_error_is_one_line_whatever_was_typed(names, tmp_path):
    rows = ["ckpt=a\nb\u2028c\x1b[31m"], [f"ckpt={names['run']}", "prompt=[a,'\udcff']"]  # the last is no UTF-8
    ended = [run("sample", *row, cwd=tmp_path) for row in rows]
    assert all(len(done.refused().stderr.splitlines()) == 1 and done.stderr[:-1].isprintable() for done in ended)
    assert "a b c\\x1b[31m" in ended[0].stderr and "surrogates not allowed" in ended[1].stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_refuses_it(name, names, tmp_path):
    arguments = shlex.split(REFUSED[name][0][0].format(**names))
    script = ROOT / ("train.py" if name == "train" else f"scripts/{name}.py")
    assert subprocess.run([sys.executable, script, *arguments], cwd=tmp_path).returncode == 2


@pytest.fixture
def copies(trained, tmp_path):
    """A function: folders with a copy of a run each, beside the folder `outside`."""
    (tmp_path / "outside").mkdir()
    return lambda n: [Path(shutil.copytree(trained, tmp_path / str(number) / "run")) for number in range(n)]


def foreign(run, out, url) -> dict:
    """Saved settings that could send something, write outside of the run's folder, or load a class."""
    lightning = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": run, "name": "x", "version": out}
    board = {"_target_": "lightning.pytorch.loggers.TensorBoardLogger", "save_dir": run, "sub_dir": out}
    text = {"source": "shakespeare", "url": f"{url}/${{oc.env:WANDB_API_KEY}}", "sha256": None, "batch_size": 4}
    return {
        "data": text | {"tokenizer": {"kind": "char"}},
        "logger.w": {"project": "x", "save_dir": run, "settings": {"base_url": url}},
        "logger.wandb": {"project": "x", "save_dir": run, "dir": out},
        "logger.csv": lightning,
        "logger.board": board,
        "callbacks.samples.folder": ".",
        "callbacks.mine": {"_target_": "lightning.pytorch.callbacks.LearningRateMonitor"},
    }


def edit(folder, place, value):
    """Sets a saved setting."""
    config = OmegaConf.load(folder / "config.yaml")
    OmegaConf.update(config, place, value, force_add=True)
    OmegaConf.save(config, folder / "config.yaml")


@pytest.mark.parametrize("command", ["heads", "evaluate", "train"])
def test_a_saved_setting_that_could_send_or_write_elsewhere_is_not_used(command, copies, tmp_path):
    keys = [*foreign("", "", "")] if command == "train" else ["data"]
    folders = copies(len(keys))
    words = [[f"resume={folder}", *STEPS] if command == "train" else [f"ckpt={folder}"] for folder in folders]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for folder, key in zip(folders, keys, strict=True):
            url = f"http://127.0.0.1:{server.getsockname()[1]}"
            edit(folder, key, foreign(str(folder), str(tmp_path / "outside"), url)[key])
        with unchanged(tmp_path):
            ended = [run(command, *each, cwd=tmp_path, WANDB_API_KEY="a" * 40) for each in words]
        for key, done in zip(keys, ended, strict=True):
            done.refused(key, "; ")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_run_goes_on_with_its_own_settings_unless_another_process_trains_it(copies, tmp_path):
    [folder] = copies(1)
    command = ("train", f"resume={folder}", *STEPS)
    (folder / "latest").symlink_to("checkpoints/last.ckpt")
    with FileLock(folder / ".run.lock"):
        run(*command, cwd=tmp_path).refused("another process", folder)
    run(*command, cwd=tmp_path).succeeded()
    assert summary(folder)["steps"] == 10
