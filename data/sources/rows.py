"""Text files, and the texts of tables: JSON lines, JSON, CSV and Parquet, all of them also compressed.

Which of them a file is follows from its ending in any case, and from its content: a file whose first line is a JSON
object has JSON lines, whatever its name. Nothing is trained on as raw markup, and no row is cut or filled up.
"""

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tril.data.settings import printable
from tril.data.sources.base import Document

Rows = Iterator[tuple[str, Any]]  # "line 3" or "row 3", for messages, and the content
OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}  # by the first bytes of a file
COMPRESSED = (".gz", ".bz2", ".xz")
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
LIMIT = 1 << 32  # bytes of a file that is read as a whole: text, and .json
FIRST_LINE = 1 << 20  # characters that are read to see whether a file has JSON lines
PARQUET_ROWS = 16  # decoded at a time
SHOWN_FIELDS = 20

csv.field_size_limit(1 << 27)  # characters of a field; Python's 131,072 are less than a book has


class UnreadableError(ValueError):
    """A file or a row that is no text. In a folder, Tril leaves out the files that begin with such."""


def read_documents(name: str, path: Path, text_field: str) -> Iterator[Document]:
    """The text of a file, or the text of each row of a table, "" for null. Empty lines are no rows.

    Args:
        name: of the document; rows have names such as "a.csv:3".
        text_field: the field that holds the text of a row. In JSON, a text stands for an object with it.

    Raises:
        UnreadableError: the file or a row cannot be read or has no text. The message has one line, which begins with
            their name, as in "a.csv: line 3".
    """
    try:
        parse = parser_of(path)
        if parse is None:
            yield Document(name, read_text(path))
            return
        for number, (place, row) in enumerate(parse(path, text_field), start=1):
            yield Document(f"{name}:{number}", text_of_row(row, text_field, place), is_row=True)
    except UnreadableError as error:
        raise UnreadableError(f"{printable(path)}: {error}") from error
    except UnicodeDecodeError as error:
        remedy = "unpack it, convert it, e.g. iconv -f latin1 -t utf-8, or leave it out"
        raise UnreadableError(f"{printable(path)}: not UTF-8 text ({error.reason}); {remedy}") from error
    except Exception as error:
        of_pyarrow = type(error).__module__.startswith("pyarrow")  # which is only imported for its files
        is_damage = of_pyarrow or isinstance(error, EOFError | zlib.error | lzma.LZMAError)
        if not is_damage and getattr(error, "errno", 0) is not None:  # of gzip, an OSError without a number
            raise
        raise UnreadableError(f"{printable(path)}: damaged ({printable(error)}); copy or create it again") from error


def read_text(path: Path) -> str:
    """The text of a file."""
    if path.stat().st_size > LIMIT:
        raise UnreadableError(f"more than {LIMIT} bytes, which are read as a whole; split it")
    with open_file(path) as file:
        text = file.read()
    if "\0" in text:
        raise UnreadableError("not text: it has a zero byte, as binary files have; leave it out")
    return text


def parser_of(path: Path) -> Callable[[Path, str], Rows] | None:
    """The function that reads a table; None: the file is text."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    parse = PARSERS.get(Path(name).suffix)
    if parse in (None, json_elements):
        with contextlib.suppress(Exception), open_file(path) as file:  # reading the file says what is wrong with it
            buffer: Any = file.buffer
            if buffer.peek(4).startswith(b"PAR1"):
                return parquet_rows
            line = file.readline(FIRST_LINE)
            if line.startswith("{") and isinstance(json.loads(line), dict):
                return json_lines
    return parse


def json_lines(path: Path, text_field: str) -> Rows:
    with open_file(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", loads(line, f"line {number}")


def json_elements(path: Path, text_field: str) -> Rows:
    """The elements of a list, or one object."""
    content = loads(read_text(path), "row 1")
    for number, element in enumerate(content if isinstance(content, list) else [content], start=1):
        yield f"row {number}", element


def loads(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # such as a number of too many digits
        raise UnreadableError(f"{place} is no JSON ({printable(error)}); correct it") from error


def csv_rows(path: Path, text_field: str) -> Rows:
    """The rows of a table with a header, with the line where each ends.

    Fields are separated by commas, semicolons or tabs: by those of which the header has most.
    """
    with open_file(path) as file:
        first = file.readline()
        reader = csv.reader(chain([first], file), delimiter=max(",;\t", key=first.count), strict=True)
        try:
            header = next(reader, [])
            for row in filter(None, reader):
                place = f"line {reader.line_num}"
                if len(row) != len(header):
                    raise UnreadableError(
                        f"{place} has {len(row)} fields, and the header has {len(header)}; correct it"
                    )
                yield place, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise UnreadableError(f"line {reader.line_num} is no CSV ({printable(error)}); correct it") from error


def parquet_rows(path: Path, text_field: str) -> Rows:
    from pyarrow.parquet import ParquetFile

    # without these options, pyarrow holds the compressed column of a whole row group
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        columns = [text_field] if text_field in table.schema_arrow.names else None
        batches = table.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False)
        for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
            yield f"row {number}", row


PARSERS: dict[str, Callable[[Path, str], Rows]] = {".json": json_elements, ".parquet": parquet_rows}
PARSERS |= dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), json_lines) | dict.fromkeys((".csv", ".tsv"), csv_rows)


def text_of_row(row: Any, text_field: str, place: str) -> str:
    """The text of a row; "" for null.

    Raises:
        UnreadableError: the row has no such field, or its value is not a string.
    """
    row = {text_field: row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise UnreadableError(f"{place} is {printable(repr(row)[:40])}; rows are JSON objects, such as {{'text': ...}}")
    if text_field not in row:
        names = printable(", ".join(map(str, list(row)[:SHOWN_FIELDS]))) or "none"
        raise UnreadableError(f"{place} has no field {text_field!r}; choose one with data.text_field=NAME: {names}")
    text = row[text_field]
    if not isinstance(text, str | None):
        cause = f"{type(text).__name__} in the field {text_field!r}, not text"
        raise UnreadableError(f"{place} has {cause}; choose another with data.text_field=NAME")
    return (text or "").encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs


def open_file(path: Path, newline: str = "") -> io.TextIOWrapper:
    """A file of UTF-8, or of UTF-16 with a byte order mark: decompressed, and without that mark.

    Line ends are not translated; `newline` tells where a line ends, as in `open`.
    """
    with path.open("rb") as file:
        start = file.read(8)
    opener = next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), open)
    file: Any = opener(path, "rb")
    encoding = "utf-16" if file.peek(2)[:2] in UTF16 else "utf-8-sig"
    return io.TextIOWrapper(file, encoding=encoding, newline=newline)
