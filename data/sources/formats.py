"""The user's files: how to find and read them. A file of rows is known by its name; any other is UTF-8 text."""

import contextlib
import csv
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tril.data.settings import printable
from tril.data.sources.base import open_file

ROWS = (".jsonl", ".json", ".csv", ".parquet")  # all but .parquet also with .gz
LIMIT = 1 << 32  # bytes of a file that is read as a whole: text, and .json
FIELD_LIMIT = 1 << 27  # characters of a field of a .csv file
PARQUET_ROWS = 16  # decoded at a time
SHOWN_FIELDS = 20


def find(key: str, pattern: str | list[str] | None) -> list[Path]:
    """The files that `pattern`, the setting data.`key`, matches: a file, a folder, a glob, or a list of them. Sorted.

    Folders and globs leave out names that begin with a dot.

    Raises:
        ValueError: no pattern.
        OSError: it matches nothing.
    """
    if isinstance(pattern, list) and pattern:
        return sorted({file for each in pattern for file in find(key, each)})
    if not pattern or not isinstance(pattern, str):
        raise ValueError(f"data.{key} is missing; give a file, a folder or a glob, such as data.{key}='texts/**/*.txt'")
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    first = next((i for i, part in enumerate(path.parts) if any(char in part for char in "*?[")), len(path.parts))
    base, rest = Path(*path.parts[:first]), path.parts[first:]
    matches = base.glob(os.path.join(*rest, *["*"] * (rest[-1] == "**"))) if rest else base.rglob("*")
    files = [file for file in matches if file.is_file()]  # no pipes or devices
    files = sorted({f for f in files if not any(part.startswith(".") for part in f.relative_to(base).parts)})
    if not files:
        raise OSError(f"data.{key}={printable(pattern)} matches no file; give a file, a folder or a glob")
    return files


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of reading a file become a ValueError of one line with its name."""
    try:
        yield
    except UnicodeDecodeError as error:
        remedy = "convert it, e.g. iconv -f latin1 -t utf-8, or choose the files with a glob"
        raise ValueError(f"{printable(path)} is not UTF-8 text ({error.reason}); {remedy}") from error
    except Exception as error:
        of_pyarrow = type(error).__module__.startswith("pyarrow")  # which is only imported for its files
        if not of_pyarrow and not isinstance(error, EOFError | zlib.error) and getattr(error, "errno", 0) is not None:
            raise
        raise ValueError(f"{printable(path)} is damaged ({printable(error)}); copy or create it again") from error


def read_text(path: Path) -> str:
    """A UTF-8 file, without its byte order mark."""
    if path.stat().st_size > LIMIT:
        raise ValueError(f"{printable(path)} has more than {LIMIT} bytes, and is read as a whole; split it")
    with reading(path), open_file(path) as file:
        content = file.read()
        if b"\0" in content:
            raise UnicodeDecodeError("utf-8", content, 0, 1, "it has a zero byte, as binary files have")
        return content.decode("utf-8-sig")


def has_rows(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(ROWS)


def read_rows(path: Path, text_field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it is, as in "a.csv, row 3", and the content of each row of a file, in order.

    Args:
        text_field: the field that is needed. In a .json file, a text stands for an object with it.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    where, number = f"{printable(path)}, {'line' if kind == '.jsonl' else 'row'}", 0
    try:
        for number, row in enumerate(_rows(path, kind, text_field), start=1):
            if isinstance(row, str):
                row = {text_field: row}
            if isinstance(row, dict):
                yield f"{where} {number}", row
            elif row is not None:
                found = printable(repr(row)[:40])
                raise ValueError(f"{where} {number} is {found}; a row is a JSON object, such as {{'text': ...}}")
    except (json.JSONDecodeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{where} {number + 1} cannot be read ({printable(error)}); correct it") from error


def _rows(path: Path, kind: str, text_field: str) -> Iterator[Any]:
    """The rows of a file as they stand in it; None: an empty line."""
    if kind == ".json":  # the elements of a list, or one object
        rows = json.loads(read_text(path))
        yield from rows if isinstance(rows, list) else [rows]
    elif kind == ".csv":
        before = csv.field_size_limit(FIELD_LIMIT)  # of the whole process
        try:
            with open_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
                yield from csv.DictReader(text, strict=True, restkey="")
        finally:
            csv.field_size_limit(before)
    elif kind == ".parquet":
        from pyarrow.parquet import ParquetFile

        # without these options, pyarrow holds the compressed column of a whole row group
        with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as table:
            columns = [text_field] if text_field in table.schema_arrow.names else None
            for batch in table.iter_batches(PARQUET_ROWS, columns=columns, use_threads=False):
                yield from batch.to_pylist()
    else:
        with open_file(path) as file:
            yield from (json.loads(line) if line.strip() else None for line in file)


def row_text(row: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a row; "" for null.

    Raises:
        ValueError: the row has no such field, or its value is not a string.
    """
    if text_field not in row:
        names = printable(", ".join(map(str, list(row)[:SHOWN_FIELDS]))) or "none"
        raise ValueError(f"{where} has no field {text_field!r}; choose one with data.text_field=NAME: {names}")
    text = row[text_field]
    if not isinstance(text, str | None):
        kind = f"{where}: field {text_field!r} holds {type(text).__name__}, not text"
        raise ValueError(f"{kind}; choose another with data.text_field=NAME")
    return encodable(text or "")


def encodable(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can hold and tokenizers refuse."""
    return text.encode("utf-8", "replace").decode("utf-8")
