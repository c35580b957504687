"""The texts of a file: a text is one document, and each row of a table is one.

Tables are JSON lines, JSON, CSV and Parquet. The content decides first: a file that begins as Parquet does, or whose
first line is a JSON object, is such a table whatever its name; of the others, the ending decides. Any file may be
compressed. No table is trained on as raw markup, and no row is cut or filled up.
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
FIRST_LINE = 1 << 20  # characters that are read to see whether a file has JSON lines
SHOWN_FIELDS = 20
DAMAGE = (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError)  # UnicodeDecodeError and pyarrow's are the first

csv.field_size_limit(1 << 27)  # characters of a field; Python's 131,072 are less than a book has


class UnreadableError(ValueError):
    """A file or a row that is no text. In a folder, Tril leaves out the files that begin with such."""


def read_documents(name: str, path: Path, text_field: str) -> Iterator[Document]:
    """The text of a file, or the text of each row of a table, "" for null. Empty lines are no rows.

    Args:
        name: of the document; rows have names such as "a.csv:3".
        text_field: the field that holds the text of a row. In JSON, a text stands for an object with it.

    Raises:
        UnreadableError: one line with the file, and the line of a row, that cannot be read or has no text.
        OSError: the disk cannot be read.
    """
    try:
        read_rows = table_reader(path)
        if read_rows is None:
            yield Document(name, read_text(path))
            return
        for number, (place, row) in enumerate(read_rows(path, text_field), start=1):
            yield Document(f"{name}:{number}", text_of_row(row, text_field, place), is_row=True)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and pyarrow raise it without a number
            raise
        remedy = "correct it, convert it to UTF-8, or leave it out"
        raise UnreadableError(f"cannot read {printable(path)}: {printable(error)}; {remedy}") from error


def table_reader(path: Path) -> Callable[[Path, str], Rows] | None:
    """The function that reads a table; None: the file is text."""
    with contextlib.suppress(Exception), open_file(path) as file:  # reading the file says what is wrong with it
        buffer: Any = file.buffer
        if buffer.peek(4).startswith(b"PAR1"):
            return parquet_rows
        if isinstance(json.loads(file.readline(FIRST_LINE)), dict):
            return json_lines
    endings = [ending.lower() for ending in path.suffixes if ending.lower() not in COMPRESSED]
    return READERS.get(endings[-1]) if endings else None


def read_text(path: Path) -> str:
    """The text of a file, which is read as a whole."""
    with open_file(path) as file:
        text = file.read()
    if "\0" in text:
        raise UnreadableError("it has a zero byte, as binary files have")
    return text


def json_lines(path: Path, text_field: str) -> Rows:
    with open_file(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", parse_json(line, f"line {number}")


def json_elements(path: Path, text_field: str) -> Rows:
    """The elements of a list, or one object."""
    content = parse_json(read_text(path), "the file")
    for number, element in enumerate(content if isinstance(content, list) else [content], start=1):
        yield f"row {number}", element


def parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # such as a number of too many digits
        raise UnreadableError(f"{place} is no JSON ({error})") from error


def csv_rows(path: Path, text_field: str) -> Rows:
    """The rows of a table with a header, with the line where each ends.

    Fields are separated by commas, semicolons or tabs: by those of which the header has most.
    """
    with open_file(path) as file:
        first = file.readline()
        rows = csv.DictReader(chain([first], file), delimiter=max(",;\t", key=first.count), strict=True)
        try:
            for row in rows:
                if None in row or None in row.values():  # as the reader marks more or fewer fields
                    raise UnreadableError("it has another number of fields than the header")
                yield f"line {rows.line_num}", row
        except (csv.Error, UnreadableError) as error:
            raise UnreadableError(f"line {rows.reader.line_num}: {error}") from error


def parquet_rows(path: Path, text_field: str) -> Rows:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as table:
        columns = [text_field] if text_field in table.schema_arrow.names else None
        batches = table.iter_batches(batch_size=100, columns=columns)  # 100 rows are decoded at a time
        for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1):
            yield f"row {number}", row


READERS: dict[str, Callable[[Path, str], Rows]] = {".json": json_elements, ".parquet": parquet_rows}
READERS |= dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), json_lines) | dict.fromkeys((".csv", ".tsv"), csv_rows)


def text_of_row(row: Any, text_field: str, place: str) -> str:
    """The text of a row: a mapping with it, or the text itself; "" for null.

    Raises:
        UnreadableError: the row has no text in that field.
    """
    fields = row if isinstance(row, dict) else {text_field: row} if isinstance(row, str) else {}
    text = fields.get(text_field, ...)
    if not isinstance(text, str | None):
        names = ", ".join(map(str, list(fields)[:SHOWN_FIELDS])) or "none"
        raise UnreadableError(f"{place} has no text in data.text_field={text_field}; its fields are {names}")
    return (text or "").encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs


def open_file(path: Path, newline: str = "") -> io.TextIOWrapper:
    """A file of UTF-8, or of UTF-16 with a byte order mark: decompressed, and without that mark.

    Line ends are not translated; `newline` tells where a line ends, as in `open`.
    """
    with path.open("rb") as file:
        start = file.read(8)
    opener = next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), open)
    content: Any = opener(path, "rb")
    encoding = "utf-16" if content.peek(2)[:2] in UTF16 else "utf-8-sig"
    return io.TextIOWrapper(content, encoding=encoding, newline=newline)
