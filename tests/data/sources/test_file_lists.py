"""Lists of paths, .json and .csv files, and files that cannot be read: all are named, or left out."""

import csv
import gzip
import json
import logging

import pytest

from tril.data.sources import file_formats
from tril.data.sources.files import Files


def documents(source):
    """The documents of both parts."""
    texts, text = [], ""
    for piece in source.all_pieces():
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    return texts


def test_a_list_of_paths_is_the_files_of_each_once(tmp_path):
    for name in ("a.txt", "notes/b.md", "notes/c.txt", "other/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    paths = [f"{tmp_path}/a.txt", f"{tmp_path}/notes/*.md", f"{tmp_path}/notes/b.md"]
    assert documents(Files(path=paths)) == ["text of a.txt", "text of notes/b.md"]
    source = Files(path=[f"{tmp_path}/notes", f"{tmp_path}/a.txt"], val_path=[f"{tmp_path}/other", f"{tmp_path}/a.txt"])
    assert [name for name, _ in source.files("train")] == ["b.md", "c.txt"]
    assert [name for name, _ in source.files("val")] == ["a.txt", "other/d.txt"]
    with pytest.raises(OSError, match=r"data.path=.*/x.txt matches no file"):
        Files(path=[f"{tmp_path}/a.txt", f"{tmp_path}/x.txt"])
    with pytest.raises(ValueError, match="data.path is missing"):
        Files(path=[])


ROWS = [{"text": 'first, "quoted"\nand more', "id": 1}, {"text": "", "id": 2}, {"text": "é third", "id": 3}]


@pytest.mark.parametrize("ending", ["json", "json.gz", "csv", "csv.gz"])
def test_rows_of_json_and_csv_are_documents(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    with (gzip.open if ending.endswith("gz") else open)(path, "wt", encoding="utf-8-sig", newline="") as file:
        if ending.startswith("json"):
            file.seek(0)
            json.dump(ROWS, file)
        else:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(ROWS)
    assert [text for text in documents(Files(path=str(path))) if text] == [ROWS[0]["text"], ROWS[2]["text"]]
    with pytest.raises(ValueError, match=r"rows.*, row 1 has no field 'body'; choose one with data.text_field=NAME: "):
        documents(Files(path=str(path), text_field="body"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'["one", "two"]', ["one", "two"]),
        ("a.json", b'{"text": "alone"}', ["alone"]),
        ("a.json", b"[1]", "a.json, row 1 is 1; a .json file holds a list of objects or of texts"),
        ("a.json", b'[{"text": ', "a.json is not JSON (Expecting value: line 1 column 11 (char 10)); correct it"),
        ("a.csv", b"text,n\nx,1,2,3\ny\n", ["x", "y"]),  # too many and too few values
        ("a.csv", b"n,text\n1\n", []),
        ("a.csv", b'text\n"x\n', "a.csv, line 1: unexpected end of data; correct the quotes"),
        ("a.csv", b"text\ncaf\xe9\n", "a.csv is not UTF-8 (invalid continuation byte); convert it"),
    ],
)
def test_small_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    if isinstance(message, list):
        assert [text for text in documents(Files(path=str(tmp_path))) if text] == message
        return
    with pytest.raises(ValueError) as raised:
        documents(Files(path=str(tmp_path)))
    assert str(raised.value) == f"{tmp_path}/{message}"


def test_limits_of_json_and_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "MAX_JSON_BYTES", 9)
    monkeypatch.setattr(file_formats, "MAX_ROW_BYTES", 9)
    (tmp_path / "a.json").write_text('["12345"]')
    (tmp_path / "a.csv").write_text("text\n123456789\n")
    assert documents(Files(path=str(tmp_path))) == ["123456789", "12345"]
    (tmp_path / "a.json").write_text('["123456"]')
    (tmp_path / "a.csv").write_text("text\n1234567890\n")
    with pytest.raises(
        ValueError, match="2 files cannot be read: .*field larger than field limit.*has more than 9 bytes"
    ):
        documents(Files(path=str(tmp_path)))
    assert csv.field_size_limit() > 9  # as before


@pytest.fixture
def mixed(tmp_path):
    """Three files that cannot be read, one without text, and four that are right."""
    for i in range(4):
        (tmp_path / f"good{i}.txt").write_text(f"text number {i} " * 30)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n" * 9)
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n{"tex\n')
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text " * 1000)[:-20])
    (tmp_path / "none.txt").touch()
    return tmp_path


def test_all_files_that_cannot_be_read_are_named(mixed):
    for read in (documents, lambda source: list(source.pieces("train"))):
        with pytest.raises(ValueError, match="^3 files cannot be read: ") as raised:
            read(Files(path=str(mixed)))
        message = str(raised.value)
        for name, reason in (
            ("cut.txt.gz", "is damaged"),
            ("latin.txt", "is not UTF-8"),
            ("rows.jsonl, line 2", "JSON"),
        ):
            assert f"{mixed}/{name} {reason}" in message or f"{mixed}/{name} is not {reason}" in message
        assert message.endswith("; correct them, or leave them out with data.on_error=skip")


def test_files_that_cannot_be_read_are_left_out(mixed, caplog):
    source = Files(path=str(mixed), on_error="skip", val_fraction=0.25)
    with caplog.at_level(logging.WARNING):
        found = [piece.text for split in ("train", "val") for piece in source.pieces(split)]
    assert sorted(filter(None, found)) == [f"text number {i} " * 30 for i in range(4)]
    [skipped, empty] = [record.getMessage() for record in caplog.records]
    assert skipped.startswith(f"data.on_error=skip leaves out 3 files: {mixed}/cut.txt.gz is damaged")
    assert empty == f"without text: {mixed}/none.txt"
    assert source.fingerprint() != Files(path=str(mixed), val_fraction=0.25).fingerprint()


def test_nothing_left_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9\n" * 9)
    with pytest.raises(ValueError, match=r"data.on_error=skip leaves no file of the train part: .*a.txt is not UTF-8"):
        list(Files(path=str(tmp_path), on_error="skip").pieces("train"))


def test_the_list_of_problems_is_short(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_bytes(b"caf\xe9\n" * 9)
    with pytest.raises(ValueError, match=r"^30 files cannot be read: .*09.txt .*; and 20 more; correct them") as raised:
        documents(Files(path=str(tmp_path)))
    assert "10.txt" not in str(raised.value)
