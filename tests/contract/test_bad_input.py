"""A wrong command line ends with status 2 and one line; nothing is computed and nothing is left behind."""

import resource
import shlex
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch

from tests.contract.harness import COMMANDS, assert_refused, newest_run, process, run, train_run

LINES = Path(__file__).with_name("bad_input.txt").read_text("utf-8").splitlines()
PAIRS = [line.rpartition(" | ") for line in LINES if line and line[0] != "#"]
ROWS = {command.strip(): [part.strip() for part in parts.split(";")] for command, _, parts in PAIRS}
FIRST = [next(row for row in ROWS if row.split()[0] == name) for name in COMMANDS]
CONTENT = {
    "text.txt": b"some text\n" * 200,
    "empty.txt": b"",
    "short.txt": b"hi",
    "latin1.txt": "é\n".encode("latin1") * 200,
    "lines.jsonl": b'{"text": "a"}\n{"text": \n',
    "field.jsonl": b'{"body": "a"}\n' * 9,
    "chat.jsonl": b'{"prompt": "a"}\n' * 9,
    "broken/config.yaml": b"a: [",
}


@pytest.fixture(scope="module")
def names(once, texts, exported):
    """What the names in braces stand for."""
    settings = f"data.path={texts}", "data.tokenizer.kind=char"
    source = newest_run(once("characters", lambda cwd: train_run(*settings, cwd=cwd)))

    def write(folder: Path) -> None:
        (folder / "folder").mkdir()
        shutil.copytree(source, folder / "broken")
        shutil.copytree(exported, folder / "pickle")
        (folder / "pickle" / "model.safetensors").rename(folder / "pickle" / "pytorch_model.bin")
        for name, content in CONTENT.items():
            (folder / name).write_bytes(content)
        torch.save([1, 2], folder / "list.ckpt")
        (folder / "half.ckpt").write_bytes((source / "checkpoints" / "last.ckpt").read_bytes()[:9000])

    folders = {"files": once("bad input", write), "run": source, "hf": exported, "gpt2": newest_run(exported.parent)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield folders | {"port": server.getsockname()[1]}


def refuse(start, row: str, names: dict, cwd: Path) -> None:
    """Starts the command line in the folder `cwd`, and compares its outcome with the row."""

    def files() -> set[Path]:
        paths = {path for folder in (cwd, names["files"], names["run"]) for path in folder.rglob("*")}
        return {path for path in paths if cwd / "cache" not in (path, *path.parents)}

    before = files()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        done = start(*(word.format(**names) for word in shlex.split(row)), cwd=cwd)
    finally:
        signal.alarm(0)
    assert_refused(done, *(part.format(**names) for part in ROWS[row]))
    assert done.out == "" and files() == before


def stop(*_) -> None:
    raise TimeoutError("the settings were accepted, and a run began")


@pytest.mark.parametrize("row", ROWS)
def test_it_is_refused(row, names, tmp_path):
    refuse(run, row, names, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", FIRST)
def test_a_process_refuses_it_in_five_seconds(row, names, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    refuse(process, row, names, tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 5  # measured: at most 3.2


def test_the_rows_are_of_all_commands():
    assert {row.split()[0] for row in ROWS} == set(COMMANDS) and len(ROWS) == len(PAIRS) >= 80
