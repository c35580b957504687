"""scripts/sample.py: what it imports, several samples, streams and terminals. The contract has its texts."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, byte_model, run_python
from tril.data.cache import resolve_cache_dir
from tril.data.settings import printable
from tril.model.checkpoint import load, save
from tril.model.generation.language_model import LanguageModel
from tril.scripts import certify, sample

SCRIPT = Path(sample.__file__)
BEST = Path("outputs/run/checkpoints/best.ckpt")
HEAVY = ("hydra", "lightning", "datasets", "wandb", "matplotlib", "scipy", "torch._dynamo")
# Runs the script and prints which of these packages it imported.
WATCHED = f"""
import atexit, runpy, sys
names = {(*HEAVY, "torch")!r}
atexit.register(lambda: print("imported:", *(name for name in names if name in sys.modules), flush=True))
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


def run(folder, *arguments):
    return call(sample.main, *arguments, "device=cpu", cwd=folder, strict=True)


def test_a_sample_without_two_heads_comes_from_latest_and_imports_no_other_library(folder):
    before = sorted(folder.rglob("*"))
    options = ["prompt=def ", "max_new_tokens=30", "seed=4", "remove_heads=[L0H1, L1H3]", "device=cpu"]
    result = run_python("-c", WATCHED, *options, cwd=folder)
    lm, gate = load(folder / "outputs" / "run"), torch.tensor([[1.0, 0, 1, 1], [1, 1, 1, 0]])
    text = lm.generate("def ", max_new_tokens=30, seed=4, head_gate=gate)
    assert (result.returncode, result.stdout) == (0, f"def {text}\nimported: torch\n"), result.stderr
    assert result.stderr == f"{BEST} on cpu\n" and sorted(folder.rglob("*")) == before
    result = run_python("-c", WATCHED, "ckpt=nowhere", cwd=folder)  # said before torch is imported
    assert (result.returncode, result.stdout) == (2, "imported:\n") and "nowhere" in result.stderr


def test_several_samples_come_under_numbered_lines(folder):
    texts = load(folder / "outputs" / "run").generate(["a", "a", "bc", "bc"], max_new_tokens=20, seed=0)
    parts = zip((1, 2, 3, 4), ("a", "a", "bc", "bc"), texts, strict=True)
    expected = "".join(f"--- {i}/4 ---\n{prompt}{text}\n" for i, prompt, text in parts)
    assert run(folder, "prompt=[a, bc]", "n=2", "max_new_tokens=20").stdout == expected


def test_pieces_are_written_one_by_one_until_control_c(folder, monkeypatch):
    written = []

    def pieces(*_, **options):
        for piece in ("one", " two"):
            yield piece
            written.append(sys.stdout.buffer.getvalue().decode())  # what the reader of a pipe has by now
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageModel, "samples", pieces)
    assert run(folder).stdout == "one two\n" and written == ["one", "one two"]


def test_compiled_code_is_kept_next_to_the_data_and_needs_a_compiler(folder, monkeypatch):
    """The prompt's pass computes the first token, so nothing is compiled for one token."""
    result = run(folder, "compile=true", "max_new_tokens=1")
    assert result.stderr.endswith("on cpu, compiled (the second token takes a while the first time)\n")
    expected = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(resolve_cache_dir() / "compiled"))
    assert result.environment["TORCHINDUCTOR_CACHE_DIR"] == expected
    monkeypatch.setenv("CXX", "no-such-compiler")
    for main in (sample.main, certify.main):
        refused = call(main, f"ckpt={BEST}", "compile=true", "device=cpu", cwd=folder)
        assert_refused(refused, "compiling for cpu needs a compiler")
        assert refused.environment["TORCHINDUCTOR_CACHE_DIR"] == expected
    refused = call(certify.main, "compile=true", "hf=folder", cwd=folder)
    assert_refused(refused, "compile=true needs one of Tril's own models")


@pytest.mark.slow
def test_a_reader_may_stop_reading(folder):
    command, options = [sys.executable, str(SCRIPT), "max_new_tokens=5000", "device=cpu"], {"stdout": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, **options)
    process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(60) == 141 and errors.count(b"\n") == 1, errors


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_without_a_prompt_a_terminal_is_asked_and_shows_no_control_characters(folder):
    import pty

    lm = load(folder / "outputs" / "run")
    texts = [lm.generate(prompt, max_new_tokens=40, seed=0) for prompt in ("a\nb", "def ")]
    assert any(not char.isprintable() for char in "".join(texts) if char not in "\n\t")
    terminal, side = pty.openpty()
    command = [sys.executable, str(SCRIPT), "max_new_tokens=40", "device=cpu"]
    with subprocess.Popen(command, cwd=folder, stdin=side, stdout=side, stderr=subprocess.DEVNULL) as process:
        os.close(side)
        os.write(terminal, b"a\\nb\n\xf0\x9f\x99\x82\ndef \n\x04")  # the second is refused, the last ends the input
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(terminal, 1000):
                shown += part
        assert process.wait() == 0
    for prompt, text in zip(("a\nb", "def "), texts, strict=True):
        assert printable(prompt + text, keep="\n\t").replace("\n", "\r\n") in shown.decode()
