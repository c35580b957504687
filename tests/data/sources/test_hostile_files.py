"""Files that are damaged, enormous or not what their name says: one line, little memory, no waiting."""

import gzip
import json
import os
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from tests.conftest import run_python
from tests.data.sources.reading import documents, text_of
from tril.data.sources import file_formats
from tril.data.sources.base import printable
from tril.data.sources.files import Files
from tril.scripts.common.cli import message_of

needs_links = pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")


def read(path, **values):
    source = Files(path=str(path), val_fraction=0.5, **values)
    return text_of(source, "train") + text_of(source, "val")


def refusal(path, error=ValueError):
    with pytest.raises(error) as caught:
        read(path)
    message = message_of(caught.value)
    assert "\x1b" not in message and (isinstance(caught.value, ValidationError) or "\n" not in str(caught.value))
    return message


def table(path, texts, **options):
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, **options)


PEAK = """
import sys
from pathlib import Path
import pyarrow.parquet
from tril.data.sources.file_formats import parquet_rows
from tril.data.sources.files import Files

def peak():  # KiB; not ru_maxrss, which starts with the peak of the parent process
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])

path, before = sys.argv[1], peak()
try:
    if path.endswith(".parquet"):
        print(sum(len(row["text"]) for row in parquet_rows(Path(path), path, "text")))
    else:
        print(sum(len(piece.text) for piece in Files(path=path, val_fraction=0.5).pieces("train")))
except ValueError as error:
    print(error)
print((peak() - before) // 1024)
"""


def peak(path):
    """What reading gives, and by how many MiB memory grows."""
    done = run_python("-c", PEAK, path, cwd=path.parent)
    assert done.stderr == ""
    result, memory = done.stdout.splitlines()
    print(f"{path.name}: {path.stat().st_size} bytes, {result}, {memory} MiB")
    return result, int(memory)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.slow
def test_a_long_line_in_a_small_archive_takes_little_memory(tmp_path):
    """300 MB without a line end, packed to 1.3 MB: text is read in pieces, a JSON line is refused."""
    with gzip.open(tmp_path / "a.txt.gz", "wb", compresslevel=1) as text:
        for _ in range(300):
            text.write(b"x" * 1_000_000)
    result, memory = peak(tmp_path / "a.txt.gz")
    assert result == "150000000" and memory < 20
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", compresslevel=1) as lines:
        lines.write(b'{"text": "x"}\n{"text": "')
        for _ in range(300):
            lines.write(b"x" * 1_000_000)
    result, memory = peak(tmp_path / "a.jsonl.gz")
    assert f"{tmp_path}/a.jsonl.gz, line 2 has more than 33554432 bytes; split it, or write" in result
    assert memory < 100


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.slow
def test_large_tables_take_little_memory(tmp_path):
    """One row group of 100 MB; 3 GB of rows that all are one text of 1 MB, in 300 bytes."""
    random = np.random.default_rng(0)
    rows = [random.bytes(1_600).hex() for _ in range(30_000)]
    table(tmp_path / "group.parquet", rows, row_group_size=10**9, compression="zstd", use_dictionary=False)
    result, memory = peak(tmp_path / "group.parquet")
    assert result == "96000000" and memory < 40
    repeated = pyarrow.array(["x" * (1 << 20)] * 3000)
    table(
        tmp_path / "bomb.parquet", repeated, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 25
    )
    assert (tmp_path / "bomb.parquet").stat().st_size < 1000
    result, memory = peak(tmp_path / "bomb.parquet")
    assert result == str(3000 << 20) and memory < 120


def test_limits_of_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "MAX_ROW_BYTES", 30)
    fits, longer = '{"text": "abcdefghijklmnopqr"}', '{"text": "abcdefghijklmnopqrs"}'
    (tmp_path / "a.jsonl").write_text(f'{{"text": "1"}}\n{fits}')
    assert read(tmp_path / "a.jsonl") == "1abcdefghijklmnopqr"
    (tmp_path / "a.jsonl").write_text(f'{{"text": "1"}}\n{longer}\n')
    assert "a.jsonl, line 2 has more than " in refusal(tmp_path / "a.jsonl")
    table(tmp_path / "a.parquet", ["1", "x" * 30])
    assert read(tmp_path / "a.parquet") == "1" + "x" * 30
    table(tmp_path / "a.parquet", ["1", "x" * 31])
    assert "a.parquet, row 2 has more than " in refusal(tmp_path / "a.parquet")


def test_a_table_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_formats, "MAX_UNPACKED", 1 << 20)
    table(tmp_path / "a.parquet", ["x" * 2**18] * 8, use_dictionary=False, compression="zstd")
    message = refusal(tmp_path / "a.parquet")
    assert "a.parquet has " in message and "row group 0 would take 2097" in message
    random = np.random.default_rng(0)
    table(tmp_path / "b.parquet", [random.bytes(2**17).hex() for _ in range(8)], use_dictionary=False)
    assert len(read(tmp_path / "b.parquet")) == 2**21


def test_rows_of_several_row_groups_and_types(tmp_path):
    texts = [f"row {i}" for i in range(100)] + ["", None, "last"]
    for name, kind in (("a", pyarrow.string()), ("b", pyarrow.large_string())):
        table(tmp_path / f"{name}.parquet", pyarrow.array(texts, kind), row_group_size=7)
    table(tmp_path / "c.parquet", pyarrow.array(texts).dictionary_encode(), row_group_size=50)
    for name in "abc":
        source = Files(path=str(tmp_path / f"{name}.parquet"), val_fraction=0.3)
        rows = documents(source, "train") + documents(source, "val")
        assert sorted(rows) == sorted(text for text in texts if text)


def test_invalid_utf8_names_the_file_and_the_line_or_row(tmp_path):
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, *map(pyarrow.py_buffer, (np.array([0, 1, 3, 4], np.int32), b"a\xff\xfeb"))]
    )
    table(tmp_path / "a.parquet", bad)
    assert "a.parquet, row 2 is not UTF-8" in refusal(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert "a.jsonl, line 2 is not JSON ('utf-8' codec" in refusal(tmp_path / "a.jsonl")
    for name, content in (("a.txt", b"one\ntwo \xff\n" * 9), ("a.txt.gz", gzip.compress(b"one\n" * 9 + b"\xe9t\xe9"))):
        (tmp_path / name).write_bytes(content)
        assert f"{name} is not UTF-8" in refusal(tmp_path / name)


def test_byte_order_marks_and_null_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\0b\nc\0\n")
    assert read(tmp_path / "a.txt") == "a\0b\nc\0\n"
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b\\u0000"}\n')
    assert sorted(read(tmp_path / "a.jsonl")) == ["\0", "a", "b"]
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "a"}\n\0\0\0\n')
    assert "b.jsonl, line 2 is not JSON" in refusal(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
    "line", ['{"a":' * 50_000, "[" * 100_000, '{"text": 1e999}', "NaN", f'{{"text": {"9" * 5000}}}']
)
def test_strange_json_is_refused(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n{line}\n')
    assert "a.jsonl, line 2" in refusal(tmp_path / "a.jsonl")


def test_names_of_fields_and_files_stay_in_one_line(tmp_path):
    assert printable("a\nb\x1b[31m\udcff\u202ec \u00e9") == r"a\nb\x1b[31m\udcff\u202ec " + "\u00e9"
    folder = tmp_path / "new\nline \x1b[31m"
    folder.mkdir()
    fields = {f"field {i}\n\x1b": i for i in range(1000)}
    (folder / "a.jsonl").write_text(json.dumps(fields))
    message = refusal(folder)
    assert r"new\nline \x1b[31m/a.jsonl, line 1 has no field 'text'" in message and len(message) < 1000
    (folder / "a.jsonl").write_text("{\n")
    assert "line 1 is not JSON" in refusal(folder)
    (folder / "a.jsonl").unlink()
    for name, content in (("a.txt.gz", b"x"), ("a.parquet", b"PAR1"), ("a.txt", b"\xff\n" * 9)):
        (folder / name).write_bytes(content)
        refusal(folder / name)
    refusal(folder / "none.txt", OSError)
    (folder / "a.pdf").touch()
    refusal(folder / "a.pdf")


@needs_links
def test_pipes_devices_and_folders_are_no_text(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for path in ("*.txt", "pipe.txt", "folder.txt", "loop.txt", "zero.txt", "**"):
        assert "matches no file" in refusal(tmp_path / path, OSError)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    for path in ("", "*.txt", "**/*.txt"):
        assert read(tmp_path / path) == "one\ntwo\n"


@needs_links
def test_loops_of_links_are_entered_once(tmp_path):
    """`glob.glob` follows two links to their own folder 2^40 times."""
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    for name in ("a.txt", "deep/b.txt", "deep/er/c.txt", "outside/d.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "deep" / ".hidden").mkdir()
    (tmp_path / "deep" / ".hidden" / "e.txt").write_text("e")
    for name in ("x", "y", "deep/z"):
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "deep" / "linked").symlink_to(tmp_path / "outside")

    def names(pattern):
        return [os.path.relpath(path, tmp_path) for path in file_formats.find("path", f"{tmp_path}/{pattern}")]

    everything = ["a.txt", "deep/b.txt", "deep/er/c.txt", "outside/d.txt"]
    assert names("**") == names("**/*.txt") == names("**/**/*.txt") == everything
    assert (
        names("deep/**")
        == names("deep/**/*.txt")
        == ["deep/b.txt", "deep/er/c.txt", "deep/linked/d.txt", "deep/z/a.txt"]
    )
    assert names("**/er/*.txt") == ["deep/er/c.txt"]
