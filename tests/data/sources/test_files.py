"""The user's files: which text is in which part and piece, and what is refused."""

import gzip
import hashlib
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from tests.data.sources.reading import documents
from tril.data.sources import file_formats
from tril.data.sources.files import Files


@pytest.mark.parametrize("ending", [".txt", ".md", ".txt.gz"])
@pytest.mark.parametrize("piece_size", [4, 1 << 18])
def test_text_files_are_split_at_a_line_start(tmp_path, monkeypatch, ending, piece_size):
    monkeypatch.setattr(file_formats, "PIECE_SIZE", piece_size)
    lines = [f"{i:03d} é\r\n" for i in range(100)]  # 8 bytes each
    opener = gzip.open if ending.endswith(".gz") else open
    with opener(tmp_path / f"a{ending}", "wb") as file:
        file.write("".join(lines).encode())
    source = Files(path=str(tmp_path), val_fraction=0.1)
    assert documents(source, "train") == ["".join(lines[:90])]
    assert documents(source, "val") == ["".join(lines[90:])]
    assert documents(Files(path=str(tmp_path), val_fraction=0.101), "val") == [
        "".join(lines[90:])
    ]  # the next line start


def test_rows_of_json_lines_and_parquet_are_documents(tmp_path):
    texts = [f"row {i}\nwith two lines" for i in range(200)]
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write("\n" + "\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "id": list(range(200))}), tmp_path / "b.parquet")
    for name, first in (("a.jsonl.gz", 2), ("b.parquet", 1)):  # number of the first row; a blank line counts
        source = Files(path=str(tmp_path / name), val_fraction=0.2)
        train, val = documents(source, "train"), documents(source, "val")
        assert sorted(train + val) == sorted(texts)
        in_hash_order = sorted(range(200), key=lambda i: hashlib.sha256(f"{name}:{i + first}".encode()).digest())
        assert set(val) == {texts[i] for i in in_hash_order[: len(val)]} and len(val) == 40
        assert val == sorted(val, key=texts.index) and train == sorted(train, key=texts.index)


def test_pieces_of_a_text_file_end_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "PIECE_SIZE", 6)
    (tmp_path / "a.txt").write_text("abc\ndefg\nhijklmnopqrstuvwxyz\nend\n")
    pieces = [piece.text for piece in Files(path=str(tmp_path), val_fraction=0.1).pieces("train")]
    assert pieces == ["abc\ndefg\n", "hijklmnopqrs", "tuvwxyz\n"]


def test_separate_validation_files(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.txt").write_text("one\ntwo\n")
    (tmp_path / "val.txt").write_text("three\n")
    source = Files(path=str(tmp_path / "train/*.txt"), val_path=str(tmp_path / "val.txt"))
    assert (documents(source, "train"), documents(source, "val")) == (["one\ntwo\n"], ["three\n"])
    assert source.fingerprint() != Files(path=str(tmp_path / "train/*.txt")).fingerprint()
    (tmp_path / "val.jsonl").write_text("".join(f'{{"text": "{i}"}}\n' for i in range(50)))
    source = Files(path=str(tmp_path / "train/*.txt"), val_path=str(tmp_path / "val.jsonl"), val_fraction=0.5)
    assert documents(source, "val") == [str(i) for i in range(50)]


def test_validation_files_in_the_same_folder_are_excluded_from_training(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus"
    (corpus / "deep").mkdir(parents=True)
    for name in ("a.txt", "deep/val.txt", "val.txt"):
        (corpus / name).write_text(f"{name}\n")
    os.symlink(corpus / "val.txt", corpus / "deep" / "also.txt")
    monkeypatch.chdir(tmp_path)
    source = Files(
        path="corpus", val_path=str(corpus / "val.txt")
    )  # a relative and an absolute path; one file is linked twice
    assert (documents(source, "train"), documents(source, "val")) == (["a.txt\n", "deep/val.txt\n"], ["val.txt\n"])
    assert documents(Files(path="corpus", val_path="corpus/**/val.txt"), "train") == ["a.txt\n"]
    assert source.fingerprint()["files"] == 3
    assert source.fingerprint() == Files(path="corpus/**/*.txt", val_path="corpus/val.txt").fingerprint()
    assert source.fingerprint() != Files(path="corpus", val_path="corpus/a.txt").fingerprint()
    with pytest.raises(
        ValueError, match=r"data.val_path=corpus/\*\* matches every file of data.path=corpus; leave some to train on"
    ):
        Files(path="corpus", val_path="corpus/**")


def test_files_of_the_same_name_have_different_hashes_and_keep_them_if_the_folder_moves(tmp_path):
    def row(i):
        return f"row {i}"

    for i in range(100):
        (tmp_path / f"here/{i}").mkdir(parents=True)
        (tmp_path / f"here/{i}/data.jsonl").write_text(json.dumps({"text": row(i)}))
    source = Files(path=str(tmp_path / "here"), val_fraction=0.2)
    val = documents(source, "val")
    assert 5 < len(val) < 40 and sorted(documents(source, "train") + val) == sorted(map(row, range(100)))
    assert documents(Files(path=f"{tmp_path}/here/*/*.jsonl", val_fraction=0.2), "val") == val
    before = source.fingerprint()
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Files(path=f"/{tmp_path}/there/", val_fraction=0.2)  # with redundant slashes
    assert documents(moved, "val") == val and moved.fingerprint() == before
    (tmp_path / "there/0").rename(tmp_path / "there/00")
    assert moved.fingerprint() != before  # the row may have moved to the other part


def test_fingerprint_depends_on_content_not_on_folder(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text("same\n")
    x, y = (Files(path=str(tmp_path / folder)) for folder in "xy")
    assert x.fingerprint() == y.fingerprint()
    (tmp_path / "y/a.txt").write_text("sane\n")
    assert x.fingerprint() != y.fingerprint()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.pdf", b"x", r"data.path=.*a\.pdf matches .*a\.pdf; supported are \.txt"),
        ("a.txt", b"caf\xe9\n" * 9, "a.txt is not UTF-8.*iconv"),
        ("a.jsonl", b'{"text": "x"}\n{"tex\n', "line 2 is not JSON"),
        ("a.jsonl", b"[1]\n", r"line 1 is .*\[1\].*; write one JSON object per line"),
        (
            "a.jsonl",
            b'{"body": "x", "id": 1}\n',
            "line 1 has no field 'text'; choose one with data.text_field=NAME: body, id",
        ),
        ("a.jsonl", b'{"text": 5}\n', "'text' holds int, not text"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        ("a.parquet", b"PAR?", "a.parquet is damaged or incomplete"),
    ],
)
def test_unreadable_files_are_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(Files(path=str(tmp_path / name), val_fraction=0.5).pieces("train"))
        list(Files(path=str(tmp_path / name), val_fraction=0.5).pieces("val"))


@pytest.mark.parametrize("ending", ["txt.gz", "jsonl.gz"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda packed: packed[:-20], "Compressed file ended"),
        (lambda packed: packed[:10] + b"\xff" * 9 + packed[19:], "invalid block type"),
        (lambda packed: packed[:-8] + bytes(8), "CRC"),
        (lambda packed: b"never packed", "Not a gzipped file"),
    ],
)
def test_damaged_files_are_named(tmp_path, ending, damage, reason):
    (tmp_path / f"a.{ending}").write_bytes(damage(gzip.compress(b'{"text": "a row"}\n' * 1000)))
    with pytest.raises(
        ValueError, match=rf"a\.{ending} is damaged or incomplete \(.*{reason}.*; copy or create it again"
    ):
        list(Files(path=str(tmp_path)).pieces("train"))


def test_a_damaged_table_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(1000)]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:50] + b"\xff" * 50 + content[100:])
    with pytest.raises(ValueError, match=r"a\.parquet is damaged or incomplete \(.*\); copy or create it again"):
        list(Files(path=str(tmp_path)).pieces("train"))


def test_patterns_without_a_match_are_refused(tmp_path):
    with pytest.raises(OSError, match="matches no file"):
        Files(path=str(tmp_path / "*.txt"))
    with pytest.raises(OSError, match="matches no file"):
        Files(path=str(tmp_path))
    with pytest.raises(ValueError, match="data.path is missing; give a file"):
        Files(path=None)


def test_parquet_without_the_field_names_the_columns(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="has no field 'text'; .*: body, id"):
        list(Files(path=str(tmp_path)).pieces("train"))
    assert documents(Files(path=str(tmp_path), text_field="body", val_fraction=1e-9), "train") == ["x"]


def test_half_a_surrogate_pair_becomes_a_replacement(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert documents(Files(path=str(tmp_path), val_fraction=1e-9), "train") == ["a?b"]
