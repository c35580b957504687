"""The formats of the user's files: how to find, open and read them."""

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from tril.data.sources.base import PIECE_SIZE, Piece

TEXT = (".txt", ".md", ".txt.gz", ".md.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON_LINES + PARQUET
PARQUET_ROWS = 1024  # rows decoded at a time


def find(key: str, pattern: str | None) -> list[Path]:
    """The files that `pattern`, the setting data.`key`, matches: a file, a folder or a glob. Sorted.

    Raises:
        ValueError: no pattern, or it matches an unsupported file.
        OSError: it matches nothing.
    """
    if not pattern:
        raise ValueError(f"data.{key} is missing; give a file, a folder or a glob, such as data.{key}='texts/**/*.txt'")
    path = Path(pattern).expanduser()
    if path.is_dir():
        matches = [file for file in path.rglob("*") if file.name.endswith(SUFFIXES)]
    else:
        matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
    files = sorted(match for match in matches if match.is_file())
    if not files:
        raise OSError(f"data.{key}={pattern} matches no file; supported are {' '.join(SUFFIXES)}")
    for file in files:
        if not file.name.endswith(SUFFIXES):
            raise ValueError(f"data.{key}={pattern} matches {file}; supported are {' '.join(SUFFIXES)}")
    return files


def open_file(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def damage_errors(path: Path) -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    if path.name.endswith(PARQUET):
        from pyarrow import ArrowInvalid

        return ArrowInvalid, OSError
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
            raise OSError(f"{file.name} became shorter while it was read; start again")
        yield Piece(decoder.decode(chunk, final=position == end), position == end)


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that is not blank."""
    with open_file(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}); write one object per line") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number} is {line[:40]!r}; write one JSON object per line")
            yield number, row


def parquet_rows(file: Any, text_field: str) -> Iterator[dict[str, Any]]:
    """The rows with `text_field` alone, or with all fields if it does not exist. Decodes PARQUET_ROWS at a time."""
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as table:
        columns = [text_field] if text_field in table.schema_arrow.names else None
        for batch in table.iter_batches(PARQUET_ROWS, columns=columns):
            yield from batch.to_pylist()


def row_text(row: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a row; "" for null.

    Raises:
        ValueError: the row has no such field, or its value is not a string.
    """
    if text_field not in row:
        raise ValueError(
            f"{where} has no field {text_field!r}; choose one with data.text_field=NAME: {', '.join(row) or 'none'}"
        )
    text = row[text_field]
    if not isinstance(text, str | None):
        raise ValueError(
            f"{where}: field {text_field!r} holds {type(text).__name__}, not text; "
            "choose another with data.text_field=NAME"
        )
    # JSON can encode half of a surrogate pair, which tokenizers refuse
    return (text or "").encode("utf-8", "replace").decode("utf-8")
