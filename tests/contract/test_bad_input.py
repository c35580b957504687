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

from tests.contract.harness import COMMANDS, ROOT, assert_refused, run, summary, table

ROWS = dict(table("bad_input.txt", columns=2))
FIRST = {row.split()[0]: row for row in reversed(ROWS)}  # of each command
BOMB = "\n".join(["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 25)])
CONTENT = {  # of files; those with a folder replace a file of a run
    "text.txt": b"some text\n" * 200,
    "empty.txt": b"",
    "short.txt": b"hi",
    "latin1.txt": "é\n".encode("latin1") * 200,
    "lines.jsonl": b'{"text": "a"}\n{"text": \n',
    "field.jsonl": b'{"body": "a"}\n' * 9,
    "chat.jsonl": b'{"prompt": "a"}\n' * 9,
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
        (folder / "half.ckpt").write_bytes((source / "checkpoints" / "last.ckpt").read_bytes()[:9000])

    folders = {"files": once("wrong", write), "run": source, "gpt2": gpt2}
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield folders | {"port": server.getsockname()[1]}


@pytest.mark.parametrize("row", ROWS)
def test_it_is_refused(row, names, tmp_path):
    parts = [part.strip().format(**names) for part in ROWS[row].split(";")]
    folders = [names["files"], names["run"]]
    assert_refused(*shlex.split(row.format(**names)), cwd=tmp_path, parts=parts, watched=folders)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_process_refuses_it_in_five_seconds(name, names, tmp_path):
    assert len(ROWS) >= 80
    _, *arguments = shlex.split(FIRST[name].format(**names))
    script = ROOT / ("train.py" if name == "train" else f"scripts/{name}.py")
    before = sum(os.times()[2:4])  # seconds of processors for processes that have ended
    assert subprocess.run([sys.executable, script, *arguments], cwd=tmp_path).returncode == 2
    assert sum(os.times()[2:4]) - before < 5  # measured: at most 3.2


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of a run, beside the folder `outside`."""
    (tmp_path / "outside").mkdir()
    return Path(shutil.copytree(trained, tmp_path / "run"))


def edit(folder, place, value):
    """Sets a saved setting."""
    config = OmegaConf.load(folder / "config.yaml")
    OmegaConf.update(config, place, value, force_add=True)
    OmegaConf.save(config, folder / "config.yaml")


@pytest.mark.parametrize("at", ["heads data", "evaluate data", *(f"train {key}" for key in FOREIGN)])
def test_a_saved_setting_that_could_send_or_write_elsewhere_is_not_used(folder, at):
    command, place = at.split()
    words = [f"resume={folder}", *STEPS] if command == "train" else [f"ckpt={folder}"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        value, url = FOREIGN[place], f"http://127.0.0.1:{server.getsockname()[1]}"
        for name, meant in (("RUN", folder), ("OUT", folder.parent / "outside"), ("URL", url)):
            value = value.replace(name, str(meant))
        edit(folder, place, yaml.safe_load(value))
        parts = [f"the saved {place}", "; "]
        assert_refused(command, *words, cwd=folder.parent, parts=parts, WANDB_API_KEY="a" * 40)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("name", ["samples.txt", ".run.lock", "loss.png", "csv", "checkpoints", "config.yaml", "new/x"])
def test_a_folder_with_links_to_places_outside_of_it_is_refused(folder, name):
    link, place = folder / name, folder.parent / "outside" / "place"
    if link.exists():
        link.rename(place)
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(place)
    parts = [f"{link} is a link to {place}", "remove it"]
    assert_refused("train", f"resume={folder}", *STEPS, cwd=folder.parent, parts=parts)


def test_a_run_goes_on_with_its_own_settings_and_with_what_is_typed_again(folder):
    cache, command = folder.parent / "outside" / "my cache", ("train", f"resume={folder}", *STEPS)
    (folder / "latest").symlink_to("checkpoints/last.ckpt")
    with FileLock(folder / ".run.lock"):
        assert_refused(*command, cwd=folder.parent, parts=["another process", folder])
    edit(folder, "data.cache_dir", str(cache))
    (typed,) = shlex.split(run(*command, cwd=folder.parent).err.partition("if you trust it, type ")[2])
    assert not cache.exists()
    run(*command, typed, cwd=folder.parent).succeeded()
    assert summary(folder)["steps"] == 10 and any(cache.iterdir())
