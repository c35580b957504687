"""Where the cache lies, and what a folder that cannot be written stops and what not."""

import os
from pathlib import Path

import pytest

from tests.conftest import run_python
from tril.data.cache import default_cache_dir, keep_compiled_code

ROOT = Path(__file__).parents[2]
LIGHTNING = "import os; from tril.data.cache import keep_compiled_code; keep_compiled_code(); import lightning"
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def no_choice(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that what a test sets is gone afterwards
    monkeypatch.delenv(VARIABLE)


def test_the_place(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TRIL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/home/someone/.cache/tril")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/tril")
    monkeypatch.setenv("TRIL_CACHE", "/t")
    assert default_cache_dir() == Path("/t")


def test_compiled_code_is_kept_beside_the_data(no_choice, monkeypatch, tmp_path):
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    keep_compiled_code()
    assert os.environ[VARIABLE] == str(tmp_path / "cache" / "compiled") and (tmp_path / "cache" / "compiled").is_dir()
    monkeypatch.setenv(VARIABLE, "/chosen")
    keep_compiled_code()
    assert os.environ[VARIABLE] == "/chosen"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_not_torchs(no_choice, tmp_path, place):
    """Who needs it to prepare text is told so there; torch would make the folder as soon as Lightning is imported."""
    (tmp_path / "file").touch()
    done = run_python("-W", "ignore", "-c", LIGHTNING, cwd=ROOT, TRIL_CACHE=str(tmp_path / place), TMPDIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
