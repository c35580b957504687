"""The user's files: how to find and read them. A file of rows is known by its name; any other is UTF-8 text."""

import codecs
import contextlib
import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from tril.data.sources.base import PIECE_SIZE, Piece, printable

ROWS = (".jsonl", ".json", ".csv", ".parquet")  # all but .parquet also with .gz
LIMIT = 1 << 27  # bytes held at once: of a row, or of a whole .json file; as Python objects it may be 20 times as much
PARQUET_ROWS = 16  # decoded at a time
FIELD_EXAMPLES = 20


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


def has_rows(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(ROWS)


def open_file(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of reading a file become a ValueError of one line with its name."""
    try:
        yield
    except UnicodeDecodeError as error:
        remedy = "convert it, e.g. iconv -f latin1 -t utf-8, or leave it out with data.on_error=skip"
        raise ValueError(f"{printable(path)} is not UTF-8 text ({error.reason}); {remedy}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{printable(path)} is damaged ({printable(error)}); copy or create it again") from error
    except Exception as error:
        is_damage = type(error).__module__.startswith("pyarrow") or (type(error) is OSError and error.errno is None)
        if path.suffix != ".parquet" or not is_damage:  # pyarrow is only imported for its files
            raise
        raise ValueError(f"{printable(path)} is damaged ({printable(error)}); copy or create it again") from error


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
        if b"\0" in chunk:
            raise UnicodeDecodeError("utf-8", chunk, 0, 1, "it has a zero byte, as binary files have")
        yield Piece(decoder.decode(chunk, final=position == end), position == end)


def read_rows(path: Path, text_field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where it is, as in "a.csv, row 3", and the content of each row of a file, in order."""
    kind = Path(path.name.removesuffix(".gz")).suffix
    read = {".jsonl": _json_lines, ".json": _json, ".csv": _csv, ".parquet": _parquet}[kind]
    rows = enumerate(read(path, text_field), start=1)
    for number, row in rows:
        where = f"{printable(path)}, {'line' if kind == '.jsonl' else 'row'} {number}"
        if row is None:
            continue
        if not isinstance(row, dict):
            raise ValueError(f"{where} is {printable(repr(row)[:40])}; a row is a JSON object, such as {{'text': ...}}")
        yield where, row


def _json_lines(path: Path, _: str) -> Iterator[Any]:
    with open_file(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(LIMIT + 1), b""), start=1):
            where = f"{printable(path)}, line {number}"
            if len(line) > LIMIT:
                raise ValueError(f"{where} has more than {LIMIT} bytes; split it, or write the text to a .txt file")
            yield _parsed(line, where, "write one object per line") if line.strip() else None


def _json(path: Path, text_field: str) -> Iterator[Any]:
    """The elements of a list, or one object; a text stands for an object with `text_field`."""
    with open_file(path) as file:
        content = file.read(LIMIT + 1)
    if len(content) > LIMIT:
        raise ValueError(f"{printable(path)} has more than {LIMIT} bytes; write it as .jsonl, a row per line")
    rows = _parsed(content, printable(path), "correct it")
    for row in rows if isinstance(rows, list) else [rows]:
        yield {text_field: row} if isinstance(row, str) else row


def _parsed(content: bytes, where: str, remedy: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({printable(error)}); {remedy}") from error


def _csv(path: Path, _: str) -> Iterator[Any]:
    limit = csv.field_size_limit(LIMIT)
    try:
        with open_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text, strict=True, restkey="")
            try:
                yield from reader
            except csv.Error as error:
                raise ValueError(f"{printable(path)}, line {reader.line_num}: {error}; correct the quotes") from error
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path, text_field: str) -> Iterator[Any]:
    return parquet_rows(path, text_field)


def parquet_rows(file: Any, text_field: str) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, a path or an open file, with `text_field` alone; without it, the names of all fields.

    A few rows are decoded at a time.
    """
    from pyarrow.parquet import ParquetFile

    # without these options, pyarrow holds the compressed column of a whole row group
    with ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as table:
        names = table.schema_arrow.names
        if text_field not in names:
            yield from [dict.fromkeys(names)][: table.metadata.num_rows]
            return
        for batch in table.iter_batches(PARQUET_ROWS, columns=[text_field], use_threads=False):
            if batch.nbytes > LIMIT * PARQUET_ROWS:
                raise ValueError(
                    f"{PARQUET_ROWS} rows of {printable(file)} have {batch.nbytes} bytes; write them as text"
                )
            for value in batch.column(0):  # one at a time: many may refer to the same long text
                yield {text_field: value.as_py()}


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
        kind = f"{where}: field {text_field!r} holds {type(text).__name__}, not text"
        raise ValueError(f"{kind}; choose another with data.text_field=NAME")
    # JSON can encode half of a surrogate pair, which tokenizers refuse
    return (text or "").encode("utf-8", "replace").decode("utf-8")
