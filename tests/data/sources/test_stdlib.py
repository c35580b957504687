"""The standard library as text: which files, in which part."""

import re
import sysconfig

import pytest
from pydantic import ValidationError

from tests.data.sources.reading import documents
from tril.data.sources.stdlib import StandardLibrary
from tril.model.validation import explain


def test_standard_library_reads_every_module_once_and_no_tests(tmp_path, monkeypatch):
    kept = {"a.py": "a", "pkg/b.py": "b\r\n", "pkg/latin.py": "caf\ufffd"}
    for name, text in kept.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if "latin" not in name else b"caf\xe9")
    tests = ["test/t.py", "pkg/tests/t.py", "idle_test/t.py"]
    for name in (*tests, "site-packages/s.py", "config-3.11/c.py", "lib-dynload/l.py", "n.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("not read")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = StandardLibrary(val_fraction=0.5)
    assert [name for name, _ in source.files()] == sorted(kept)
    assert sorted(documents(source, "train") + documents(source, "val")) == sorted(kept.values())
    before = source.fingerprint()
    assert before == StandardLibrary(val_fraction=0.5).fingerprint() != StandardLibrary(val_fraction=0.4).fingerprint()
    (tmp_path / "a.py").write_text("A")
    assert source.fingerprint() != before


def test_this_standard_library_has_the_documented_size():
    source = StandardLibrary()
    train, val = (sum(len(piece.text) for piece in source.pieces(split)) for split in ("train", "val"))
    assert 8e6 < train + val < 30e6
    assert 0.02 < val / (train + val) < 0.10


@pytest.mark.parametrize("fraction", [0, 1, -0.1, "x", True])
def test_wrong_fractions_are_refused(fraction):
    with pytest.raises(ValidationError) as error:
        StandardLibrary(val_fraction=fraction)
    assert re.match(r"data\.val_fraction=\S+ must be ", explain(error.value))
