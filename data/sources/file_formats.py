"""The formats of the user's files: how to find, open and read them."""

import codecs
import csv
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any, BinaryIO, cast

from tril.data.sources.base import PIECE_SIZE, Piece, printable

TEXT = (".txt", ".md", ".txt.gz", ".md.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
CSV = (".csv", ".csv.gz")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON_LINES + JSON + CSV + PARQUET
PARQUET_ROWS = 16  # rows decoded at a time
PARQUET_BUFFER = 1 << 20  # bytes
MAX_UNPACKED = 1 << 28  # bytes of a row group: of larger ones, fewer rows are decoded at a time
MAX_RATIO = 1000  # of the size of such a row group and that of the file; zstd packs English text to a third
MAX_ROW_BYTES = 1 << 25  # of a JSON line or a parquet value; as Python objects, JSON may take 20 times as much
MAX_JSON_BYTES = 1 << 28  # of a .json file, which is read as a whole
TOO_LONG = f"has more than {MAX_ROW_BYTES} bytes; split it, or write the text to a .txt file"
FIELD_EXAMPLES = 20


def find(key: str, pattern: str | list[str] | None, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """The files with one of `suffixes` that `pattern`, the setting data.`key`, matches: a file, a folder, a glob, or a
    list of them. Sorted.

    Raises:
        ValueError: no pattern, or it matches an unsupported file.
        OSError: it matches nothing.
    """
    if isinstance(pattern, list) and pattern:
        return sorted({file for each in pattern for file in find(key, each, suffixes)})
    if not pattern or not isinstance(pattern, str):
        raise ValueError(f"data.{key} is missing; give a file, a folder or a glob, such as data.{key}='texts/**/*.txt'")
    path, setting = Path(pattern).expanduser(), f"data.{key}={printable(pattern)}"
    if path.is_dir():
        matches = [file for file in path.rglob("*") if file.name.endswith(suffixes)]
    else:
        matches = [path] if path.is_file() else map(Path, _glob(path))
    files = sorted({match for match in matches if match.is_file()})  # no pipes or devices
    if not files:
        raise OSError(f"{setting} matches no file; supported are {' '.join(suffixes)}")
    for file in files:
        if not file.name.endswith(suffixes):
            raise ValueError(f"{setting} matches {printable(file)}; supported are {' '.join(suffixes)}")
    return files


def _glob(pattern: Path) -> list[str]:
    """The paths that match. `**` enters each folder once, also where links form a loop, unlike in `glob.glob`."""
    parts = pattern.parts
    if "**" not in parts:
        return glob.glob(str(pattern))
    at = parts.index("**")
    rest = tuple(dropwhile("**".__eq__, parts[at:])) or ("*",)
    folders = [folder for base in glob.glob(str(Path(*parts[:at]))) for folder in _folders(base)]
    return [match for folder in folders for match in _glob(Path(glob.escape(folder), *rest))]


def _folders(base: str) -> Iterator[str]:
    """`base` and the folders below it that are not hidden. Links are followed last, to folders not seen before."""
    seen, starts = set(), [base]
    for start in starts:
        for folder, subfolders, _ in os.walk(start):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            paths = [os.path.join(folder, name) for name in subfolders]
            starts += [path for path in paths if os.path.islink(path)]
            yield folder


def open_file(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def damage_errors(path: Path) -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    if path.name.endswith(PARQUET):
        from pyarrow import ArrowException

        return ArrowException, OSError
    return EOFError, zlib.error, gzip.BadGzipFile


def read_text(file: BinaryIO, start: int, end: int) -> Iterator[Piece]:
    """The bytes from `start` to `end` as pieces of about PIECE_SIZE bytes: whole lines, except for longer lines."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # drops a byte order mark
    position = file.seek(start)
    while position < end:
        chunk = file.read(min(PIECE_SIZE, end - position))
        chunk += file.readline(min(PIECE_SIZE, end - position - len(chunk)))
        position += len(chunk)
        if not chunk:
            raise OSError(f"{printable(file.name)} became shorter while it was read; start again")
        yield Piece(decoder.decode(chunk, final=position == end), position == end)


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that is not blank."""
    with open_file(path) as file:
        lines = iter(lambda: file.readline(MAX_ROW_BYTES + 1), b"")
        for number, line in enumerate(lines, start=1):
            where = f"{printable(path)}, line {number}"
            if len(line) > MAX_ROW_BYTES:
                raise ValueError(f"{where} {TOO_LONG}")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON ({printable(error)}); write one object per line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} is {line[:40]!r}; write one JSON object per line")
            yield number, row


def json_array(path: Path, text_field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of every element of a .json file: objects, or texts alone; a single object is one row."""
    with open_file(path) as file:
        content = file.read(MAX_JSON_BYTES + 1)
    if len(content) > MAX_JSON_BYTES:
        raise ValueError(f"{printable(path)} has more than {MAX_JSON_BYTES} bytes; write it as .jsonl, a row per line")
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{printable(path)} is not JSON ({printable(error)}); correct it") from error
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        row = {text_field: row} if isinstance(row, str) else row
        if not isinstance(row, dict):
            kind = f"{printable(path)}, row {number} is {printable(repr(row)[:40])}"
            raise ValueError(f"{kind}; a .json file holds a list of objects or of texts")
        yield number, row


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, row) of every row below the header."""
    limit = csv.field_size_limit(MAX_ROW_BYTES)
    try:
        with open_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text, strict=True, restkey="")
            try:
                yield from enumerate(reader, start=1)
            except UnicodeDecodeError as error:
                raise ValueError(f"{printable(path)} is not UTF-8 ({error.reason}); convert it") from error
            except csv.Error as error:
                raise ValueError(f"{printable(path)}, line {reader.line_num}: {error}; correct the quotes") from error
    finally:
        csv.field_size_limit(limit)


def parquet_rows(file: Any, name: object, text_field: str) -> Iterator[dict[str, Any]]:
    """The rows with `text_field` alone; if it does not exist, one row with the names of all fields.

    Decodes PARQUET_ROWS at a time, and of a large row group less: a few bytes may stand for many long rows.

    Args:
        file: a `Path` or an open file, which errors call `name`.
    """
    from pyarrow.parquet import ParquetFile

    packed = file.stat().st_size if isinstance(file, Path) else file.seek(0, os.SEEK_END)
    # without these options, pyarrow holds the compressed column of a whole row group
    with ParquetFile(file, buffer_size=PARQUET_BUFFER, pre_buffer=False) as table:
        names, number = table.schema_arrow.names, 0
        if text_field not in names:
            yield from [dict.fromkeys(names)][: table.metadata.num_rows]
            return
        for group in range(table.metadata.num_row_groups):
            # not of the column: reading its metadata ends the process if they are damaged (pyarrow 26)
            unpacked = table.metadata.row_group(group).total_byte_size
            if unpacked > max(MAX_UNPACKED, MAX_RATIO * packed):
                raise ValueError(
                    f"{printable(name)} has {packed} bytes, and row group {group} would take {unpacked}; "
                    f"write it with less than {MAX_RATIO} times its size"
                )
            n_rows = max(1, min(PARQUET_ROWS, MAX_UNPACKED // max(unpacked, 1)))
            for batch in table.iter_batches(n_rows, row_groups=[group], columns=[text_field], use_threads=False):
                for value in batch.column(0):  # one at a time: many may refer to the same long text
                    number += 1
                    yield {text_field: _parquet_value(value, f"{printable(name)}, row {number}")}


def _parquet_value(value: Any, where: str) -> Any:
    if hasattr(value, "as_buffer") and (buffer := value.as_buffer()) is not None and buffer.size > MAX_ROW_BYTES:
        raise ValueError(f"{where} {TOO_LONG}")
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 ({error.reason}); convert the text") from error


def row_text(row: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a row; "" for null.

    Raises:
        ValueError: the row has no such field, or its value is not a string.
    """
    if text_field not in row:
        names = printable(", ".join(list(row)[:FIELD_EXAMPLES])) or "none"
        raise ValueError(f"{where} has no field {text_field!r}; choose one with data.text_field=NAME: {names}")
    text = row[text_field]
    if not isinstance(text, str | None):
        raise ValueError(
            f"{where}: field {text_field!r} holds {type(text).__name__}, not text; "
            "choose another with data.text_field=NAME"
        )
    # JSON can encode half of a surrogate pair, which tokenizers refuse
    return (text or "").encode("utf-8", "replace").decode("utf-8")
