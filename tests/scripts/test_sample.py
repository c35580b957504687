"""scripts/sample.py: what it imports, several samples, pieces and terminals. The contract has its texts."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.conftest import byte_model
from tests.contract.harness import Process, run
from tril.data.settings import printable
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.model.runs import load
from tril.model.training import hardware
from tril.scripts import sample

SCRIPT = Path(sample.__file__)
BEST = Path("outputs/run/checkpoints/best.ckpt")
HEAVY = ("lightning", "datasets", "wandb", "matplotlib", "scipy", "torch._dynamo", "torch")
WATCHED = f"""
import atexit, runpy, sys
atexit.register(lambda: print("imported:", *(name for name in {HEAVY} if name in sys.modules), flush=True))
sys.argv[0] = {str(SCRIPT)!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a checkpoint below outputs/, which no test changes."""
    path = tmp_path_factory.mktemp("sample")
    torch.manual_seed(0)
    save(path / BEST, byte_model())
    return path


def sampled(folder, *arguments):
    return run("sample", *arguments, "device=cpu", cwd=folder, strict=True)


def watched(*arguments, folder):
    """The command in a new process, which prints the heavy libraries that it imported."""
    options = {"cwd": folder, "env": os.environ | {"PYTHONIOENCODING": "utf-8"}, "encoding": "utf-8"}
    return subprocess.run([sys.executable, "-c", WATCHED, *arguments], capture_output=True, timeout=300, **options)


def test_samples_come_from_latest_under_numbered_lines_and_import_no_other_library(folder):
    before, gate = sorted(folder.rglob("*")), torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0]])
    options = ["prompt=[a, bc]", "n=4", "max_new_tokens=20", "seed=4", "remove_heads=[L0H1, L1H3]", "device=cpu"]
    result, prompts = watched(*options, folder=folder), ["[a, bc]"] * 4
    texts = load(folder / "outputs/run").generate(prompts, max_new_tokens=20, seed=4, head_gate=gate)
    parts = zip((1, 2, 3, 4), prompts, texts, strict=True)
    expected = "".join(f"--- {i}/4 ---\n{prompt}{text}\n" for i, prompt, text in parts)
    assert (result.returncode, result.stdout) == (0, f"{expected}imported: torch\n"), result.stderr
    assert result.stderr == f"{BEST} on cpu\n" and sorted(folder.rglob("*")) == before
    result = watched("ckpt=nowhere", folder=folder)  # said before torch is imported
    assert (result.returncode, result.stdout) == (2, "imported:\n") and "nowhere" in result.stderr


def test_pieces_are_written_one_by_one_until_control_c(folder, monkeypatch):
    written = []

    def pieces(*_, **options):
        for piece in ("one", " two"):
            yield piece
            written.append(sys.stdout.buffer.getvalue().decode())  # what the reader of a pipe has by now
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageModel, "samples", pieces)
    assert sampled(folder).stdout == "one two\n" and written == ["one", "one two"]


def test_compiled_code_needs_a_compiler(folder, monkeypatch):
    monkeypatch.setattr(hardware, "compile_error", lambda device: None)  # compiles a function
    result = sampled(folder, "compile=true", "max_new_tokens=1")  # by one pass over the prompt, so nothing is compiled
    assert result.stderr.endswith("on cpu, compiled (the second token takes a while the first time)\n")
    monkeypatch.setattr(hardware, "compile_error", lambda device: f"no compiler for {device}")
    for name in ("sample", "certify"):
        refused = run(name, f"ckpt={BEST}", "compile=true", "device=cpu", cwd=folder)
        refused.refused("compile=true", "no compiler for cpu", "compile=false")


@pytest.mark.slow
def test_a_reader_may_stop_reading(folder):
    command = [sys.executable, str(SCRIPT), "device=cpu", "max_new_tokens=5000"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and errors.count(b"\n") == 1, errors


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_stream_is_no_error_and_its_text_is_not_in_the_other(name, folder):
    words = "max_new_tokens=4", "device=cpu"
    expected = vars(run("sample", *words, cwd=folder).succeeded()) | {name: ""}
    closed = Process("sample", *words, cwd=folder, before=partial(setattr, sys, name, None)).done()
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, expected["stdout"], expected["stderr"])


@pytest.mark.slow
def test_a_terminal_shows_no_control_characters(folder):
    import pty

    text = load(folder / "outputs/run").generate("a\nb", max_new_tokens=40, seed=0)
    assert any(not char.isprintable() for char in text if char not in "\n\t")
    terminal, side = pty.openpty()
    command = [sys.executable, str(SCRIPT), "device=cpu", "max_new_tokens=40", r"prompt=a\nb"]
    subprocess.run(command, cwd=folder, stdout=side, stderr=subprocess.DEVNULL, check=True)
    shown = os.read(terminal, 10_000).decode()
    assert shown == printable(f"a\nb{text}\n", keep="\n\t").replace("\n", "\r\n")
