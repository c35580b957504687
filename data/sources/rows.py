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
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tril.data.settings import printable
from tril.data.sources.base import Document

OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}  # by the first bytes of a file
COMPRESSED = (".gz", ".bz2", ".xz")
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
FIRST_LINE = 1 << 20  # characters that are read to see whether a file has JSON lines
SHOWN_FIELDS = 20
# What readers raise for content: UnicodeDecodeError and most errors of json and pyarrow are ValueErrors
DAMAGE = (ValueError, RecursionError, csv.Error, EOFError, zlib.error, lzma.LZMAError, OSError)

csv.field_size_limit(1 << 27)  # characters of a field; Python's 131,072 are less than a book has


class UnreadableError(ValueError):
    """A file or a row that is no text. In a folder, Tril leaves out the files that begin with such."""


class Lines(Iterator[str]):
    """The lines of a file of UTF-8, or of UTF-16 with a byte order mark: decompressed, and without that mark.

    Line ends are not translated.

    Attributes:
        number: of the line that was read last; 0: none was.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, 0

    @cached_property
    def file(self) -> io.TextIOWrapper:
        with self.path.open("rb") as file:
            start = file.read(8)
        opener = next((opener for magic, opener in OPENERS.items() if start.startswith(magic)), open)
        content: Any = opener(self.path, "rb")
        encoding = "utf-16" if content.peek(2)[:2] in UTF16 else "utf-8-sig"
        return io.TextIOWrapper(content, encoding=encoding, newline="")

    def __next__(self) -> str:
        line = next(self.file)
        self.number += 1
        return line


def read_documents(name: str, path: Path, text_field: str) -> Iterator[Document]:
    """The text of a file, or the text of each row of a table, "" for null. Empty lines are no rows.

    Args:
        name: of the document; rows have names such as "a.csv:3".
        text_field: the field that holds the text of a row. In JSON, a text stands for an object with it.

    Raises:
        UnreadableError: one line with the file, and the line or number of a row, that cannot be read or has no text.
        OSError: the disk cannot be read.
    """
    lines, number, read_rows = Lines(path), 0, table_reader(path)
    try:
        with lines.file:
            if read_rows is None:
                yield Document(name, read_text(lines))
                return
            for number, row in enumerate(read_rows(lines), start=1):
                yield Document(f"{name}:{number}", text_of_row(row, text_field), is_row=True)
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:  # of content, it has no number
            raise
        place = f", line {lines.number}" if lines.number else f", row {number}" if number else ""
        remedy = "" if isinstance(error, UnreadableError) else "; correct it, convert it to UTF-8, or leave it out"
        raise UnreadableError(f"cannot read {printable(path)}{place}: {printable(error)}{remedy}") from error


def table_reader(path: Path) -> Callable[[Lines], Iterator[Any]] | None:
    """The function that reads the rows of a table; None: the file is text."""
    with contextlib.suppress(Exception), Lines(path).file as file:  # reading the file says what is wrong with it
        buffer: Any = file.buffer
        if buffer.peek(4).startswith(b"PAR1"):
            return parquet_rows
        if isinstance(json.loads(file.readline(FIRST_LINE)), dict):
            return json_lines
    endings = [ending.lower() for ending in path.suffixes if ending.lower() not in COMPRESSED]
    return READERS.get(endings[-1]) if endings else None


def read_text(lines: Lines) -> str:
    """All lines as one text."""
    text = lines.file.read()
    if "\0" in text:
        raise UnreadableError("it has a zero byte, as binary files have; leave it out")
    return text


def json_lines(lines: Lines) -> Iterator[Any]:
    return (json.loads(line) for line in lines if line.strip())


def json_elements(lines: Lines) -> Iterator[Any]:
    """The elements of a list, or one object."""
    content = json.loads(read_text(lines))
    return iter(content if isinstance(content, list) else [content])


def csv_rows(lines: Lines) -> Iterator[dict]:
    """The rows of a table with a header.

    Fields are separated by commas, semicolons or tabs: by those of which the header has most.
    """
    first = next(lines, "")
    for row in csv.DictReader(chain([first], lines), delimiter=max(",;\t", key=first.count), strict=True):
        if None in row or None in row.values():  # as the reader marks more or fewer fields
            raise UnreadableError("the row has another number of fields than the header; correct it")
        yield row


def parquet_rows(lines: Lines) -> Iterator[dict]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(lines.file.buffer) as table:
        for batch in table.iter_batches(batch_size=100):  # 100 rows are decoded at a time
            yield from batch.to_pylist()


READERS = {".json": json_elements, ".parquet": parquet_rows}
READERS |= dict.fromkeys((".jsonl", ".ndjson", ".jsonlines"), json_lines) | dict.fromkeys((".csv", ".tsv"), csv_rows)


def text_of_row(row: Any, text_field: str) -> str:
    """The text of a row: a mapping with it, or the text itself; "" for null.

    Raises:
        UnreadableError: the row has no text in that field.
    """
    fields = row if isinstance(row, dict) else {text_field: row} if isinstance(row, str) else {}
    text = fields.get(text_field, ...)
    if not isinstance(text, str | None):
        names = ", ".join(map(str, list(fields)[:SHOWN_FIELDS]))
        remedy = f"set it to one of {names}" if fields else "the row has no fields; correct it"
        raise UnreadableError(f"there is no text in data.text_field={text_field}; {remedy}")
    return (text or "").encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs
