"""No space, no permission: one line with a remedy, and nothing that a later run trusts."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import run_python
from tril.data import cache
from tril.data.cache import make_folder, write_file, write_folder
from tril.data.prepare import prepare
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig

BYTE = TokenizerConfig(kind="byte")

PREPARE = """
import resource, sys
from tril.data.prepare import prepare
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig
limit = int(sys.argv[3])
if limit:  # bytes of any file, which stands for a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    print(len(prepare(Files(sys.argv[1]), TokenizerConfig(kind="byte"), sys.argv[2], progress=False).tokens("train")))
except OSError as error:
    print(error)
"""


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("some words in a line\n" * 3000)
    return tmp_path / "text.txt"


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
@pytest.mark.parametrize("limit", [1, 10, 3000, 100_000])
def test_a_disk_that_fills_up_while_preparing(tmp_path, text, limit):
    """While the lock, the tokenizer or the tokens are written; then the same again with space."""
    done = run_python("-c", PREPARE, text, tmp_path / "cache", str(limit), cwd=tmp_path)
    assert done.stderr == "" and done.stdout.count("\n") == 1
    assert (
        done.stdout.startswith(f"cannot write {tmp_path}/cache/files-")
        and "(File too large); free space" in done.stdout
    )
    assert "data.cache_dir=FOLDER or the environment variable TRIL_CACHE" in done.stdout
    assert list((tmp_path / "cache").iterdir()) == []
    done = run_python("-c", PREPARE, text, tmp_path / "cache", "0", cwd=tmp_path)
    assert int(done.stdout) > 50_000


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_the_errors_of_a_full_disk(tmp_path):
    """Of the kernel's own full device."""

    def fill(part):
        with open("/dev/full", "wb") as file:
            file.write(b"content")

    with pytest.raises(
        OSError, match="cannot write .*/a .No space left on device.; free space on that disk, or choose"
    ):
        write_folder(tmp_path / "a", fill, lambda _: True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="needs permissions that count")
def test_a_folder_without_permission(tmp_path, text):
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(OSError, match="cannot write to the cache folder .*/cache; choose another cache folder"):
        prepare(Files(str(text)), BYTE, tmp_path / "cache", progress=False)


def test_a_read_only_cache_serves_what_it_has_and_refuses_what_it_lacks(tmp_path, text, monkeypatch):
    """Root may write everywhere, so the answer of the system is replaced."""
    folder = prepare(Files(str(text)), BYTE, tmp_path / "cache", progress=False).folder
    before = {path: path.stat().st_mtime_ns for path in [tmp_path / "cache", folder, *folder.iterdir()]}
    monkeypatch.setattr(cache.os, "access", lambda path, mode: False)
    prepare(Files(str(text)), BYTE, tmp_path / "cache", progress=False)
    with pytest.raises(OSError, match="cannot write to the cache folder .*/cache; choose another cache folder"):
        prepare(Files(str(text)), BYTE, tmp_path / "cache", token_budget=9, progress=False)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(OSError, match="cannot write to the cache folder .*/cache; choose another cache folder"):
        prepare(Files(str(text)), BYTE, tmp_path / "cache", progress=False)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert {path.name for path in before if before[path] != after[path]} == {"tokenizer.json"}


def test_a_file_where_the_folder_belongs(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="cannot write to the cache folder .*/file; choose another"):
        make_folder(tmp_path / "file")
    with pytest.raises(OSError, match="cannot write to the cache folder .*/file; choose another"):
        write_file(tmp_path / "file" / "a", b"")
    write_folder(tmp_path / "file", lambda part: (part / "a").write_text("y"), lambda folder: folder.is_dir())
    assert (tmp_path / "file" / "a").read_text() == "y"


def test_names_of_the_source_cannot_leave_the_cache(tmp_path):
    """The folder has the name of the source, a slug; a repository's name is made one."""
    from tril.data.sources.hub import Hub

    (tmp_path / "..x y").mkdir()
    for row in ("train", "validation"):
        (tmp_path / "..x y" / f"{row}.jsonl").write_text(json.dumps({"text": row}) + "\n")
    assert Hub(repo=str(tmp_path / "..x y")).name == "x-y"
    for repo in ("../../nowhere", "a/../b", "/nowhere", "a\nb"):
        with pytest.raises(ValueError, match="must be a folder or a name on the hub"):
            Hub(repo=repo)
    for split in ("../x", "a/b", "", "train[:5%]"):
        with pytest.raises(ValueError, match="data.train_split=.* must be the name of a whole split"):
            Hub(repo="a/b", train_split=split)
