"""Files are replaced as a whole, and JSON contains no NaN."""

import json
import math
import os

import pytest

from tril.model.atomic_files import atomic_path, without_nan, write_json, write_text


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    write_text(tmp_path / "a.txt", "old é")
    with pytest.raises(ZeroDivisionError), atomic_path(tmp_path / "a.txt") as part:
        part.write_text("half")
        assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "old é"
        raise ZeroDivisionError
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "old é" and os.listdir(tmp_path) == ["a.txt"]


def test_values_that_json_lacks_become_null(tmp_path):
    assert without_nan({"a": [math.nan, 1.5, {"b": math.nan}], "c": "nan"}) == {
        "a": [None, 1.5, {"b": None}],
        "c": "nan",
    }
    write_json(tmp_path / "a.json", {"x": (math.inf, 2), "y": -math.inf})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": [None, 2], "y": None}
