"""A full disk, a read-only one and a limit of file size: one line with the reason, and the earlier checkpoint stays."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tril.model.checkpoint import read, write

CONTENT = {"state_dict": {}, "tril": {"format": 2, "config": {}, "tokenizer": "", "eot": ""}}


def large(n_bytes=4_000_000):
    return CONTENT | {"state_dict": {"a": torch.zeros(n_bytes // 4)}, "step": 2}


def assert_kept(folder, message):
    """The earlier checkpoint is whole, nothing else is left, and the message is one line."""
    path = folder / "last.ckpt"
    with pytest.raises(OSError) as error:
        write(path, large())
    assert str(error.value) == f"cannot write {path}: {message} another folder with hydra.run.dir"
    assert read(path) == CONTENT | {"step": 1} and os.listdir(folder) == ["last.ckpt"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mount: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk(small_disk):
    write(small_disk / "last.ckpt", CONTENT | {"step": 1})
    assert_kept(small_disk, "No space left on device; free space, or choose")


def test_a_read_only_disk(small_disk):
    write(small_disk / "last.ckpt", CONTENT | {"step": 1})
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    assert_kept(small_disk, "Read-only file system; choose")


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="POSIX only")
def test_a_limit_of_the_file_size(tmp_path):
    import resource

    write(tmp_path / "last.ckpt", CONTENT | {"step": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert_kept(tmp_path, "File too large; choose")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)


def test_a_file_where_the_folder_should_be(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(
        OSError, match=r"cannot write \S+last.ckpt: (File exists|Not a directory); choose another folder"
    ):
        write(tmp_path / "checkpoints" / "last.ckpt", CONTENT)


def test_errors_that_are_not_of_the_disk_are_not_hidden(tmp_path, monkeypatch):
    def fail(content, file):
        raise RuntimeError("a mistake of torch")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="a mistake of torch"):
        write(tmp_path / "a.ckpt", CONTENT)
    assert os.listdir(tmp_path) == []


def test_what_could_not_be_read_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="callbacks/score is of type float64, and must be a plain value or a tensor"):
        write(tmp_path / "a.ckpt", CONTENT | {"callbacks": {"score": torch.tensor(1.0).numpy().astype("float64")[()]}})
    assert os.listdir(tmp_path) == []
