"""The user's files: what is read, and what is an error in one line:  python -m pytest tests/data/test_text.py"""

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tril.data.prepare import pieces_of
from tril.data.sources.files import Files
from tril.data.split import plan_split


def documents(source, split):
    """The documents of one part. A text without end-of-text is one document."""
    texts = [""]
    for piece in pieces_of(source, plan_split(source), split):
        texts[-1] += piece.text
        if piece.ends_document:
            texts.append("")
    return texts if texts[-1] else texts[:-1]


def write(folder, files):
    """Writes files of these names and contents, texts or bytes."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


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
        write(tmp_path, {name: compress(text.encode(encoding))})
        assert read(tmp_path / name) == [text]


TEXTS = ["one, two; 'three'", 'a "quoted"\nline', "", "漢字\t<|endoftext|>"]
OBJECTS = [{"id": i, "text": text} for i, text in enumerate(TEXTS)] + [{"id": 4, "text": None}]
LINES = "\n\n".join(map(json.dumps, OBJECTS))


def table(separator):
    quoted = ['"' + str(each["text"] or "").replace('"', '""') + '"' for each in OBJECTS]
    return f"id{separator}text\n" + "".join(f"{i}{separator}{text}\n" for i, text in enumerate(quoted))


def parquet():
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(OBJECTS), content := io.BytesIO())
    return content.getvalue()


TABLES = [
    *((f"rows{ending}", LINES) for ending in (".jsonl", ".NDJSON", ".jsonlines", ".JSON", ".txt", "")),
    *(("rows.json", json.dumps(OBJECTS, indent=indent)) for indent in (None, 2)),
    ("rows.json", json.dumps([*TEXTS, ""])),
    *((name, table(separator)) for name, separator in (("rows.csv", ","), ("rows.csv", ";"), ("rows.TSV", "\t"))),
    *((name, parquet()) for name in ("rows.parquet", "ROWS.PARQUET", "rows")),
]


@pytest.mark.parametrize(("name", "content"), TABLES)
def test_the_texts_of_a_table_are_its_documents(tmp_path, name, content):
    content = content.encode() if isinstance(content, str) else content
    for ending, compress in (("", bytes), (".gz", gzip.compress), (".XZ", lzma.compress)):
        write(tmp_path, {name + ending: compress(content)})
        assert read(tmp_path / (name + ending)) == [*TEXTS, ""]


UNREADABLE = [  # name, content, and the parts of the message
    ("a.json", "[", []),
    ("a.json", '{"text": 1}\n', ["line 1", "data.text_field"]),
    ("a.jsonl", '{"text": "a"}\n\n{"text": ' + "9" * 5000 + "}", ["line 3"]),
    ("a.jsonl", '{"text": "a"}\n' + "[" * 9999, ["line 2"]),
    ("a.jsonl", "1", ["line 1"]),
    ("a.csv", 'text\n"x', ["line 2"]),
    ("a.csv", "other,more\n1,2", ["line 2", "data.text_field", "other, more"]),
    ("a.csv", 'id,text\n1,"a\nb"\n2,c,d\n', ["line 4"]),
    ("a.csv", "id,text\n1,a\n2\n", ["line 3"]),
    ("a.parquet", "PAR1", []),
    ("a.parquet", parquet().replace(b"text", b"tent"), ["data.text_field", "id, tent"]),
    ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], []),
    ("a.txt.gz", b"\x1f\x8b not of gzip", []),
    ("a.txt", "é".encode("latin-1"), ["UTF-8"]),
    ("a.txt", "a\0b", ["zero byte"]),
    ("a.txt", "", ["empty"]),
    ("a.jsonl", "\n", ["empty"]),
]


@pytest.mark.parametrize(("name", "content", "parts"), UNREADABLE)
def test_a_named_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path, name, content, parts):
    write(tmp_path, {name: content})
    message = error_of(lambda: read(tmp_path / name))
    assert all(part in message for part in (name, *parts)), message


def test_a_folder_leaves_out_what_holds_no_text_and_says_so(tmp_path):
    write(tmp_path, {"a.py": "a", "b.md": "é", ".hidden": "h", ".git/c": "c", "empty": ""})
    write(tmp_path, {"1.png": "\0", "2.png": b"\xff", "latin": b"\xe9", "package.json": "{}"})
    source = Files(path=str(tmp_path))
    assert [document.text for document in source.documents("train") if document.text] == ["a", "é"]
    assert "4 of 7" in source.note and "2 .png" in source.note
    write(tmp_path, {"rows.jsonl": '{"text": "x"}\n{"other": "y"}\n'})  # a damaged table is not left out
    assert "rows.jsonl, line 2" in error_of(lambda: read(tmp_path))


NAMES = ["a.txt", "b.md", "n/c.txt", "n/m/d.txt", "o[1]/g.txt"]
PATTERNS = [
    ("", NAMES),
    ("**", NAMES),
    ("**/*.txt", [name for name in NAMES if name != "b.md"]),
    ("*/*.txt", ["n/c.txt", "o[1]/g.txt"]),
    ("o[1]", ["o[1]/g.txt"]),
]


@pytest.mark.parametrize(("pattern", "found"), PATTERNS)
def test_the_files_of_a_pattern(tmp_path, pattern, found):
    write(tmp_path, {name: name for name in (*NAMES, ".git/e.txt", "n/.f.txt")})
    assert read(tmp_path / pattern) == found
    both = Files(path=[f"{tmp_path}/n/*.txt", f"{tmp_path}/b.md"])
    assert [document.text for document in both.documents("train")] == ["b.md", "n/c.txt"]
    assert "data.path" in error_of(lambda: read(tmp_path / "*.rst"))


def test_links_to_folders_are_followed_once_and_not_upwards(tmp_path):
    write(tmp_path, {"text/a.txt": "a", "other/b.txt": "b", "above.txt": "c"})
    (tmp_path / "text" / "up").symlink_to(tmp_path)  # or to /
    (tmp_path / "text" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "text" / "loop").symlink_to(tmp_path / "text")
    for pattern in ("text", "text/**/*.txt"):
        assert read(tmp_path / pattern) == ["a", "b"]


def test_files_for_validation_are_excluded_from_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path(), {f"{name}.txt": name for name in "abc"})
    source = Files(path=".", val_path="b.txt")
    assert (documents(source, "train"), documents(source, "val")) == (["a", "c"], ["b"])


def test_a_hidden_file_changes_no_fingerprint_and_a_moved_folder_neither(tmp_path):
    write(tmp_path, {"a/x.txt": "x"})
    before = Files(path=str(tmp_path / "a")).fingerprint()
    write(tmp_path, {"a/.DS_Store": "other"})
    assert Files(path=str((tmp_path / "a").rename(tmp_path / "b"))).fingerprint() == before
    write(tmp_path, {"b/x.txt": "y"})
    assert Files(path=str(tmp_path / "b")).fingerprint() != before


def test_another_field_holds_the_text(tmp_path):
    (tmp_path / "a.csv").write_text("text,body\nx,y\n")
    (tmp_path / "a.txt").write_text("text")
    assert read(tmp_path / "a.csv", text_field="body") == ["y"]
    with pytest.raises(ValueError, match="data.text_field=body"):
        read(tmp_path / "a.txt", text_field="body")
