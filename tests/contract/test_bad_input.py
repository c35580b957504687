"""A wrong command line and a damaged or foreign folder end with status 2 and one line, and leave nothing behind.

A run folder from somebody else is data: opening it sends nothing, and writes nothing outside of it.
"""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from omegaconf import OmegaConf

from tests.contract.harness import COMMANDS, ROOT, run, run_each, summary, table, unchanged

ROWS = dict(table("bad_input.txt", columns=2))
OF = {name: [row for row in ROWS if row.split()[0] == name] for name in COMMANDS}
PARTS = {f"{name} {i}": OF[name][i : i + 16] for name in COMMANDS for i in range(0, len(OF[name]), 16)}
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
FOREIGN = dict(table("foreign_settings.txt", columns=2))
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


@pytest.mark.parametrize("part", PARTS)
def test_it_is_refused(part, names, tmp_path):
    arguments = [shlex.split(row.format(**names))[1:] for row in PARTS[part]]
    with unchanged(tmp_path, names["files"], names["run"]):
        ended = run_each(part.split()[0], arguments, cwd=tmp_path)
    for row, done in zip(PARTS[part], ended, strict=True):
        assert not done.refused(*(part.strip().format(**names) for part in ROWS[row].split(";"))).out


def test_an_error_is_one_line_whatever_was_typed(names, tmp_path):
    typed = "ckpt=a\nb\u2028c\x1b[31m", f"ckpt={names['run']} prompt=[a,'\udcff']"  # the last is no UTF-8
    ended = run_each("sample", [typed[:1], typed[1].split()], cwd=tmp_path)
    assert all(len(done.refused().err.splitlines()) == 1 and done.err[:-1].isprintable() for done in ended)
    assert "a b c\\x1b[31m" in ended[0].err and "surrogates not allowed" in ended[1].err


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_refuses_it_in_five_seconds(name, names, tmp_path):
    _, *arguments = shlex.split(OF[name][0].format(**names))
    script = ROOT / ("train.py" if name == "train" else f"scripts/{name}.py")
    before = sum(os.times()[2:4])  # seconds of processors for processes that have ended
    assert subprocess.run([sys.executable, script, *arguments], cwd=tmp_path).returncode == 2
    assert sum(os.times()[2:4]) - before < 5  # measured: at most 3.2


@pytest.fixture
def copies(trained, tmp_path):
    """A function: folders with a copy of a run each, beside the folder `outside`."""
    (tmp_path / "outside").mkdir()
    return lambda n: [Path(shutil.copytree(trained, tmp_path / str(number) / "run")) for number in range(n)]


def edit(folder, place, value):
    """Sets a saved setting."""
    config = OmegaConf.load(folder / "config.yaml")
    OmegaConf.update(config, place, value, force_add=True)
    OmegaConf.save(config, folder / "config.yaml")


@pytest.mark.parametrize(("command", "keys"), [("heads", ["data"]), ("evaluate", ["data"]), ("train", [*FOREIGN])])
def test_a_saved_setting_that_could_send_or_write_elsewhere_is_not_used(command, keys, copies, tmp_path):
    folders = copies(len(keys))
    words = [[f"resume={folder}", *STEPS] if command == "train" else [f"ckpt={folder}"] for folder in folders]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for folder, key in zip(folders, keys, strict=True):
            value, url = FOREIGN[key], f"http://127.0.0.1:{server.getsockname()[1]}"
            for name, meant in (("RUN", folder), ("OUT", tmp_path / "outside"), ("URL", url)):
                value = value.replace(name, str(meant))
            edit(folder, key, yaml.safe_load(value))
        with unchanged(tmp_path):
            ended = run_each(command, words, cwd=tmp_path, WANDB_API_KEY="a" * 40)
        assert not any(done.refused(key, "; ").out for key, done in zip(keys, ended, strict=True))
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
