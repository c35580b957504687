"""The user's files: what is read, and what is an error in one line:  python -m pytest tests/data/test_text.py"""

import bz2
import gzip
import json
import lzma

import pyarrow
import pyarrow.parquet
import pytest

from tril.data.prepare import pieces_of
from tril.data.sources.files import Files
from tril.data.split import plan_split


def pieces(source, split):
    return list(pieces_of(source, plan_split(source), split))


def text_of(source, split):
    return "".join(piece.text for piece in pieces(source, split))


def documents(source, split):
    texts = [""]
    for piece in pieces(source, split):
        texts[-1] += piece.text
        if piece.ends_document:
            texts.append("")
    assert texts.pop() == ""
    return texts


def write(folder, files):
    """Writes files of these names and contents."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def read(path, **settings):
    """The texts of all documents."""
    return [document.text for document in Files(path=str(path), **settings).documents("train")]


def error_of(task):
    """The message of the error that the task raises, which is one line."""
    with pytest.raises((ValueError, OSError)) as error:
        task()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["notes", "a [1]*?.txt", ".hidden.cfg", 'with "quotes".TXT'])
def test_a_named_text_is_read_as_it_is(tmp_path, name, compress):
    text = "def f():\r\n    return 'é漢'\n\n\rno end"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):  # the last one with a byte order mark
        (tmp_path / name).write_bytes(compress(text.encode(encoding)))
        assert read(tmp_path / name) == [text]


TEXTS = ["one, two; 'three'", 'a "quoted"\nline', "", "漢字\t<|endoftext|>"]
OBJECTS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)] + [{"id": 4, "text": None}]
LINES = "\n\n".join(map(json.dumps, OBJECTS))


def table(separator):
    quoted = ['"' + str(each["text"] or "").replace('"', '""') + '"' for each in OBJECTS]
    return f"id{separator}text\n" + "".join(f"{i}{separator}{text}\n" for i, text in enumerate(quoted))


TABLES = [
    *((f"rows{ending}", LINES) for ending in (".jsonl", ".NDJSON", ".jsonlines", ".JSON", ".txt", "")),
    *(("rows.json", json.dumps(OBJECTS, indent=indent)) for indent in (None, 2)),
    ("rows.json", json.dumps([text for text in TEXTS] + [""])),
    *((name, table(separator)) for name, separator in (("rows.csv", ","), ("rows.csv", ";"), ("rows.TSV", "\t"))),
]


@pytest.mark.parametrize(("name", "content"), TABLES)
def test_the_texts_of_a_table_are_its_documents(tmp_path, name, content):
    for ending, compress in (("", bytes), (".gz", gzip.compress), (".XZ", lzma.compress)):
        (tmp_path / (name + ending)).write_bytes(compress(content.encode()))
        assert read(tmp_path / (name + ending)) == [*TEXTS, ""]


@pytest.mark.parametrize("name", ["rows.parquet", "ROWS.PARQUET", "rows"])
def test_the_texts_of_a_parquet_file_are_its_documents(tmp_path, name):
    pyarrow.parquet.write_table(pyarrow.table({"text": [*TEXTS, None]}), tmp_path / name)
    assert read(tmp_path / name) == [*TEXTS, ""]


def test_another_field_holds_the_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,body\nx,y\n")
    (tmp_path / "a.txt").write_text("text")
    assert read(tmp_path / "a.csv", text_field="body") == ["y"]
    with pytest.raises(ValueError, match="data.text_field=body"):
        read(tmp_path / "a.txt", text_field="body")


UNREADABLE = [  # name, content, and the parts of the message
    ("a.json", b"[", ["a.json: row 1"]),
    ("a.json", b'{"text": 1}\n', ["a.json: line 1", "'text'"]),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": ' + b"9" * 5000 + b"}", ["a.jsonl: line 3"]),
    ("a.jsonl", b'{"text": "a"}\n[' * 99, ["a.jsonl: line 2"]),
    ("a.jsonl", b"1", ["a.jsonl: line 1 is 1"]),
    ("a.csv", b'text\n"x', ["a.csv: line 2"]),
    ("a.csv", b"other,more\n1,2", ["a.csv: line 2", "data.text_field=NAME", "other, more"]),
    ("a.csv", b'id,text\n1,"a\nb"\n2,c,d\n', ["a.csv: line 4", "3 fields", "2"]),
    ("a.csv", b"id,text\n1,a\n2\n", ["a.csv: line 3", "1 fields", "2"]),
    ("a.parquet", b"PAR1", ["a.parquet: damaged"]),
    ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], ["a.txt.gz: damaged"]),
    ("a.txt", "é".encode("latin-1"), ["a.txt: not UTF-8"]),
    ("a.txt", b"a\0b", ["a.txt", "zero byte"]),
    ("a.txt", b"", ["a.txt is empty"]),
    ("a.jsonl", b"\n", ["a.jsonl is empty"]),
]


@pytest.mark.parametrize(("name", "content", "parts"), UNREADABLE)
def test_a_named_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    message = error_of(lambda: read(tmp_path / name))
    assert all(part in message for part in parts), message


def test_a_text_above_the_limit_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tril.data.sources.rows.LIMIT", 64)
    (tmp_path / "a.txt").write_text("a" * 99)
    assert "more than 64 bytes" in error_of(lambda: read(tmp_path / "a.txt"))


def test_a_folder_leaves_out_what_holds_no_text_and_says_so(tmp_path):
    write(tmp_path, {"a.py": b"a", "b.md": "é".encode(), ".hidden": b"h", ".git/c": b"c", "empty": b""})
    write(tmp_path, {"1.png": b"\0", "2.png": b"\xff", "latin": b"\xe9", "package.json": b"{}"})
    source = Files(path=str(tmp_path))
    assert [document.text for document in source.documents("train") if document.text] == ["a", "é"]
    assert "left out 4 of 7 files" in source.note and "2 .png" in source.note
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n{"other": "y"}\n')  # a damaged table is not left out
    assert "rows.jsonl: line 2" in error_of(lambda: read(tmp_path))


def test_the_files_of_a_pattern(tmp_path):
    names = ("a.txt", "b.md", "n/c.txt", "n/m/d.txt", ".git/e.txt", "n/.f.txt", "o[1]/g.txt")
    write(tmp_path, dict.fromkeys(names, b"text"))

    def names(pattern):
        return [path.relative_to(tmp_path).as_posix() for _, path in Files(path=pattern).files["train"]]

    everything = ["a.txt", "b.md", "n/c.txt", "n/m/d.txt", "o[1]/g.txt"]
    assert names(str(tmp_path)) == names(f"{tmp_path}/**") == everything
    assert names(f"{tmp_path}/**/*.txt") == [name for name in everything if name != "b.md"]
    assert names(f"{tmp_path}/*/*.txt") == ["n/c.txt", "o[1]/g.txt"]
    assert names([f"{tmp_path}/n/*.txt", f"{tmp_path}/b.md"]) == ["b.md", "n/c.txt"]
    assert names(f"{tmp_path}/o[1]") == ["o[1]/g.txt"]
    assert "matches no file" in error_of(lambda: names(f"{tmp_path}/*.rst"))


def test_links_to_folders_are_followed_once(tmp_path):
    write(tmp_path, {"text/a.txt": b"a", "other/b.txt": b"b"})
    (tmp_path / "text" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "text" / "loop").symlink_to(tmp_path / "text")
    for pattern in ("text", "text/**/*.txt"):
        assert read(tmp_path / pattern) == ["a", "b"]


def test_files_for_validation_are_excluded_from_training(tmp_path):
    write(tmp_path, {f"{name}.txt": name.encode() for name in "abc"})
    source = Files(path=str(tmp_path), val_path=str(tmp_path / "b.txt"))
    assert (text_of(source, "train"), text_of(source, "val")) == ("ac", "b")


def test_a_hidden_file_changes_no_fingerprint_and_a_moved_folder_neither(tmp_path):
    write(tmp_path, {"a/x.txt": b"x"})
    before = Files(path=str(tmp_path / "a")).fingerprint()
    (tmp_path / "a" / ".DS_Store").write_text("other")
    assert Files(path=str((tmp_path / "a").rename(tmp_path / "b"))).fingerprint() == before
    (tmp_path / "b" / "x.txt").write_text("y")
    assert Files(path=str(tmp_path / "b")).fingerprint() != before
