"""Files are replaced as a whole, and JSON contains no NaN."""

import json
import math
import os
import subprocess
import sys

import pytest

from tril.model.atomic_files import atomic_path, remove_leftovers, without_nan, write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(28, "No space left on device")

    write_text(tmp_path / "a.txt", "old é")
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        raise ZeroDivisionError
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "old é" and os.listdir(tmp_path) == ["a.txt"]


def test_values_that_json_lacks_become_null(tmp_path):
    assert without_nan({"a": [math.nan, 1.5, {"b": math.nan}], "c": "nan"}) == {
        "a": [None, 1.5, {"b": None}],
        "c": "nan",
    }
    write_json(tmp_path / "a.json", {"x": (math.inf, 2), "y": -math.inf})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [None, 2], "y": None}


def test_the_content_is_on_the_disk_before_the_name_changes(tmp_path, monkeypatch):
    """Otherwise a power failure can leave the new name with no content."""
    events, replace = [], os.replace

    def fsync(descriptor):
        events.append("folder" if os.path.samestat(os.fstat(descriptor), tmp_path.stat()) else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: [events.append("replace"), replace(*paths)])
    write_text(tmp_path / "a.txt", "new")
    assert events == (["file", "replace"] if os.name == "nt" else ["file", "replace", "folder"])


def test_a_killed_process_leaves_the_old_file_and_a_leftover(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    code = """
import os, signal, sys
from tril.model.atomic_files import atomic_path
with atomic_path(sys.argv[1]) as part:
    part.write_text("half")
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "a.txt"], timeout=60)
    assert done.returncode != 0 and (tmp_path / "a.txt").read_text() == "old"
    [leftover] = set(os.listdir(tmp_path)) - {"a.txt"}
    assert leftover.startswith(".a.txt.") and leftover.endswith(".part")
    remove_leftovers(tmp_path)
    assert os.listdir(tmp_path) == ["a.txt"]
