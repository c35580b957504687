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
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from tril.data.settings import printable

Kind = Literal["text", "lines", "json", "csv", "parquet"]
KINDS: dict[str, Kind] = {".jsonl": "lines", ".ndjson": "lines", ".jsonlines": "lines", ".json": "json"}
KINDS |= {".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
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


def kind_of(path: Path) -> Kind:
    """How a file is read."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    kind = KINDS.get(Path(name).suffix, "text")
    if kind in ("text", "json"):
        with (
            contextlib.suppress(ValueError, RecursionError, EOFError, zlib.error, lzma.LZMAError),
            open_file(path) as file,
        ):
            buffer: Any = file.buffer
            if buffer.peek(4).startswith(b"PAR1"):
                return "parquet"
            line = file.readline(FIRST_LINE)
            if line.startswith("{") and isinstance(json.loads(line), dict):
                return "lines"
    return kind


def read_text(path: Path) -> str:
    """The text of a file. Raises UnreadableError, as `read_rows`, in one line."""
    if path.stat().st_size > LIMIT:
        raise UnreadableError(f"{printable(path)} has more than {LIMIT} bytes, and is read as a whole; split it")
    with reading(path), open_file(path) as file:
        text = file.read()
    if "\0" in text:
        raise UnreadableError(f"{printable(path)} is not text: it has a zero byte, as binary files have; leave it out")
    return text


def read_rows(path: Path, kind: Kind, text_field: str) -> Iterator[str]:
    """The text of each row of a table, in order; "" for null. Empty lines are no rows.

    Args:
        text_field: the field that holds it. In JSON, a text stands for an object with it.

    Raises:
        UnreadableError: a row cannot be read or has no text; the message names it, as in "a.csv, line 3".
    """
    number = 0
    parse = {"lines": parse_lines, "json": parse_json, "csv": parse_csv, "parquet": parse_parquet}[kind]
    try:
        with reading(path):
            for number, row in parse(path, text_field):  # noqa: B007 the message names it
                yield text_of_row(row, text_field)
    except RowError as error:
        unit = "line" if kind in ("lines", "csv") else "row"
        raise UnreadableError(f"{printable(path)}, {unit} {error.number or number} {error}") from error


class RowError(ValueError):
    """A row that cannot be read: the end of the sentence that begins with its place.

    Args:
        number: of the row; 0: the one that was read last.
    """

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


def parse_lines(path: Path, text_field: str) -> Iterator[tuple[int, Any]]:
    """The rows of JSON lines, with the numbers of the lines, from 1."""
    with open_file(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, loads(line, number)


def parse_json(path: Path, text_field: str) -> Iterator[tuple[int, Any]]:
    """The elements of a list, or one object."""
    content = loads(read_text(path), 1)
    yield from enumerate(content if isinstance(content, list) else [content], start=1)


def loads(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # such as a number of too many digits
        raise RowError(f"is no JSON ({printable(error)}); correct it", number) from error


def parse_csv(path: Path, text_field: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a table with a header, with the number of the line where each ends.

    Fields are separated by commas, semicolons or tabs: by those of which the header has most.
    """
    with open_file(path) as file:
        first = file.readline()
        reader = csv.reader(chain([first], file), delimiter=max(",;\t", key=first.count), strict=True)
        try:
            header = next(reader, [])
            for row in filter(None, reader):
                if len(row) != len(header):
                    raise RowError(
                        f"has {len(row)} fields, and the header has {len(header)}; correct it", reader.line_num
                    )
                yield reader.line_num, dict(zip(header, row, strict=True))
        except csv.Error as error:
            raise RowError(f"is no CSV ({printable(error)}); correct it", reader.line_num) from error


def parse_parquet(path: Path, text_field: str) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow.parquet import ParquetFile

    # without these options, pyarrow holds the compressed column of a whole row group
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
        columns = [text_field] if text_field in table.schema_arrow.names else None
        batches = table.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False)
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), start=1)


def text_of_row(row: Any, text_field: str) -> str:
    """The text of a row; "" for null.

    Raises:
        RowError: the row has no such field, or its value is not a string.
    """
    row = {text_field: row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise RowError(f"is {printable(repr(row)[:40])}; a row is a JSON object, such as {{'text': ...}}")
    if text_field not in row:
        names = printable(", ".join(map(str, list(row)[:SHOWN_FIELDS]))) or "none"
        raise RowError(f"has no field {text_field!r}; choose one with data.text_field=NAME: {names}")
    text = row[text_field]
    if not isinstance(text, str | None):
        cause = f"has {type(text).__name__} in the field {text_field!r}, not text"
        raise RowError(f"{cause}; choose another with data.text_field=NAME")
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


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of reading a file become an UnreadableError of one line with its name."""
    try:
        yield
    except UnicodeDecodeError as error:
        remedy = "unpack it, convert it, e.g. iconv -f latin1 -t utf-8, or leave it out"
        raise UnreadableError(f"{printable(path)} is not UTF-8 text ({error.reason}); {remedy}") from error
    except Exception as error:
        of_pyarrow = type(error).__module__.startswith("pyarrow")  # which is only imported for its files
        is_damage = of_pyarrow or isinstance(error, EOFError | zlib.error | lzma.LZMAError)
        if not is_damage and getattr(error, "errno", 0) is not None:  # of gzip, an OSError without a number
            raise
        raise UnreadableError(f"{printable(path)} is damaged ({printable(error)}); copy or create it again") from error
