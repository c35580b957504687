"""The user's own files: texts, and tables in which every row is a document."""

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.sources.base import PIECE_SIZE, SETTINGS, Piece, Split, ValFraction, cut, digest_files, in_split

TEXT = (".txt", ".md", ".txt.gz", ".md.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
SUFFIXES = TEXT + JSON_LINES + PARQUET
PARQUET_ROWS = 1024  # rows decoded at a time


@dataclass(frozen=True, config=SETTINGS)
class Files:
    """Files with one of SUFFIXES.

    A text file is a document; its last `val_fraction`, from a line start on, is for validation. In .jsonl and .parquet
    files every row is a document; a hash of file name and row number puts about `val_fraction` of the rows into
    validation. The name is relative to the common folder of all files, so moving that folder does not change the split.

    Args:
        path: a file, a folder (searched recursively), or a glob (`**` for any depth).
        text_field: the key or column that holds the text of a row.
        val_path: like `path`; these files are the validation part, the other files of `path` the training part.
    """

    path: str | None
    text_field: str = "text"
    val_fraction: ValFraction = 0.05
    val_path: str | None = None
    name = "files"

    @model_validator(mode="after")
    def _check_files(self) -> "Files":
        self.files("train")
        return self

    def files(self, split: Split) -> list[tuple[str, Path]]:
        """(path relative to the common folder, path) of the files that contain `split`, sorted.

        Raises:
            ValueError: `path` or `val_path` matches an unsupported file, or `val_path` matches all files of `path`.
            OSError: `path` or `val_path` matches nothing.
        """
        paths = find("path", self.path)
        if self.val_path is not None:
            val_paths = find("val_path", self.val_path)
            excluded = {path.resolve() for path in val_paths}
            paths = val_paths if split == "val" else [path for path in paths if path.resolve() not in excluded]
        if not paths:
            raise ValueError(
                f"data.val_path={self.val_path} matches every file of data.path={self.path}; leave some to train on"
            )
        common = os.path.commonpath([path.parent for path in paths])
        return [(os.path.relpath(path, common), path) for path in paths]

    def fingerprint(self) -> dict[str, Any]:
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{split} {name}", path) for split in splits for name, path in self.files(split)]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        return common | ({"val_fraction": self.val_fraction} if self.val_path is None else {"val_path": True})

    def pieces(self, split: Split) -> Iterator[Piece]:
        part = split if self.val_path is None else None  # None: whole files
        for name, path in self.files(split):
            try:
                yield from self._text(path, part) if path.name.endswith(TEXT) else self._rows(name, path, part)
            except _damage_errors(path) as error:
                raise ValueError(f"{path} is damaged or incomplete ({error}); copy or create it again") from error

    def _text(self, path: Path, split: Split | None) -> Iterator[Piece]:
        with _open(path) as file:
            size = file.seek(0, os.SEEK_END)
            middle = _line_start(file, int(size * (1 - self.val_fraction)))
            start, end = {None: (0, size), "train": (0, middle), "val": (middle, size)}[split]
            try:
                yield from _read(file, start, end)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 ({error.reason}); convert it, e.g. iconv -f latin1 -t utf-8"
                ) from error

    def _rows(self, name: str, path: Path, split: Split | None) -> Iterator[Piece]:
        is_parquet = path.name.endswith(PARQUET)
        rows = enumerate(parquet_rows(path, self.text_field), start=1) if is_parquet else _json_rows(path)
        for number, row in rows:
            text = row_text(row, self.text_field, f"{path}, {'row' if is_parquet else 'line'} {number}")
            if split is None or in_split(f"{name}:{number}", split, self.val_fraction):
                yield from cut(text)


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


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


def _damage_errors(path: Path) -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    if path.name.endswith(PARQUET):
        from pyarrow import ArrowInvalid

        return ArrowInvalid, OSError
    return EOFError, zlib.error, gzip.BadGzipFile


def _line_start(file: BinaryIO, position: int) -> int:
    """The first line start at or after `position`, or the end of the file."""
    file.seek(max(position - 1, 0))
    while (part := file.readline(PIECE_SIZE)) and not part.endswith(b"\n"):
        pass
    return file.tell()


def _read(file: BinaryIO, start: int, end: int) -> Iterator[Piece]:
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


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, row) of every line that is not blank."""
    with _open(path) as file:
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
