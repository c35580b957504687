"""Which folder is the cache, and when a folder that cannot be written is an error."""

import os
from pathlib import Path

import pytest

from tril.data.cache import keep_compiled_code, resolve_cache_dir

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # so that monkeypatch undoes what the test sets
    monkeypatch.delenv(VARIABLE)


def test_the_folder_is_the_first_that_is_set(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("USERPROFILE", "/home/someone")  # on Windows
    monkeypatch.delenv("TRIL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert resolve_cache_dir() == Path("/home/someone/.cache/tril")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert resolve_cache_dir() == Path("/x/tril")
    monkeypatch.setenv("TRIL_CACHE", "~/t")
    assert resolve_cache_dir() == Path("/home/someone/t")
    assert resolve_cache_dir("~/chosen") == Path("/home/someone/chosen")


def test_compiled_code_is_kept_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    keep_compiled_code()
    assert os.environ[VARIABLE] == str(tmp_path / "cache" / "compiled") and (tmp_path / "cache" / "compiled").is_dir()
    monkeypatch.setenv(VARIABLE, "/chosen")
    keep_compiled_code()
    assert os.environ[VARIABLE] == "/chosen"


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_compiled_code_is_not_kept_in_an_unwritable_cache(monkeypatch, tmp_path, folder):
    """Importing Lightning creates the folder that the variable names, and would fail."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / folder))
    keep_compiled_code()
    assert VARIABLE not in os.environ
