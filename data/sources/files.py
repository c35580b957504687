"""A user's own files as a source: texts, and tables whose rows are documents."""

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from tril.data.sources.base import PIECE_SIZE, Piece, Split, check_fraction, cut, digest_files, in_split

TEXT = (".txt", ".md", ".txt.gz", ".md.gz")
JSON_LINES = (".jsonl", ".jsonl.gz")
PARQUET = (".parquet",)
LEGAL = TEXT + JSON_LINES + PARQUET
PARQUET_ROWS = 1024  # rows decoded at a time


@dataclass(frozen=True)
class Files:
    """Files of the kinds in LEGAL.

    A text file is a document whose last `val_fraction`, from a line start on, validates. In .jsonl and .parquet every row is a
    document, and a hash of row number and file name puts about `val_fraction` of the rows into validation. File names count from the
    folder that all files share, so that a moved folder is split as before.

    path: a file, a folder (searched to every depth), or a glob (`**` for any depth).
    text_field: the key or column that holds the text of a row.
    val_path: like `path`; these files are the validation part then, the other files of `path` the training part, and none is split.
    """

    path: str
    text_field: str = "text"
    val_fraction: float = 0.05
    val_path: str | None = None
    name = "files"

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)
        self.files("train")

    def files(self, split: Split) -> list[tuple[str, Path]]:
        """(name below the folder that they share, path) of the files that `split` is taken from, sorted.

        Raises:
            ValueError, OSError: see `find`; ValueError too where `val_path` leaves nothing to train on.
        """
        paths = find("path", self.path)
        if self.val_path is not None:
            held_out = find("val_path", self.val_path)
            known = {path.resolve() for path in held_out}
            paths = held_out if split == "val" else [path for path in paths if path.resolve() not in known]
        if not paths:
            raise ValueError(
                f"data.val_path={self.val_path}: takes every file of data.path={self.path}; leave some to train on"
            )
        shared = os.path.commonpath([path.parent for path in paths])
        return [(os.path.relpath(path, shared), path) for path in paths]

    def fingerprint(self) -> dict[str, Any]:
        parts: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{part} {name}", path) for part in parts for name, path in self.files(part)]
        split = {"val_fraction": self.val_fraction} if self.val_path is None else {"val_path": True}
        return {
            "kind": self.name,
            "files": len(files),
            "sha256": digest_files(files),
            "text_field": self.text_field,
            **split,
        }

    def pieces(self, split: Split) -> Iterator[Piece]:
        own = split if self.val_path is None else None
        for name, path in self.files(split):
            try:
                yield from self._text(path, own) if path.name.endswith(TEXT) else self._rows(name, path, own)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(
                    f"{path} is damaged or not all of it is there ({error}); copy or pack it again"
                ) from error

    def _text(self, path: Path, split: Split | None) -> Iterator[Piece]:
        with _open(path) as file:
            size = file.seek(0, os.SEEK_END)
            middle = _line_start(file, int(size * (1 - self.val_fraction)))
            start, end = {None: (0, size), "train": (0, middle), "val": (middle, size)}[split]
            try:
                yield from _read(file, start, end)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 ({error.reason}); convert it first, e.g. iconv -f latin1 -t utf-8"
                ) from error

    def _rows(self, name: str, path: Path, split: Split | None) -> Iterator[Piece]:
        rows = _parquet_rows if path.name.endswith(PARQUET) else _json_rows
        for number, text in rows(path, self.text_field):
            if split is None or in_split(f"{name}:{number}", split, self.val_fraction):
                yield from cut(text)


def find(key: str, pattern: object) -> list[Path]:
    """The files that `pattern` (file, folder or glob) names, sorted.

    Raises:
        ValueError: no pattern, or it matches a file of an unknown kind.
        OSError: it matches nothing.
    """
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"data.{key}={pattern}: give a file, a folder or a glob, such as data.{key}='texts/**/*.txt'")
    place = Path(pattern).expanduser()
    if place.is_dir():
        paths = [path for path in place.rglob("*") if path.name.endswith(LEGAL) and path.is_file()]
    else:
        matches = [place] if place.is_file() else map(Path, glob.glob(str(place), recursive=True))
        paths = [path for path in matches if path.is_file()]
    if not paths:
        raise OSError(f"data.{key}={pattern}: no file matches; a folder is searched for {' '.join(LEGAL)}")
    unknown = [path for path in paths if not path.name.endswith(LEGAL)]
    if unknown:
        raise ValueError(f"data.{key}={pattern}: cannot read {unknown[0]}; legal endings are {' '.join(LEGAL)}")
    return sorted(paths)


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")


def _line_start(file: BinaryIO, position: int) -> int:
    """The first line start at or after `position`, or the end of the file."""
    file.seek(max(position - 1, 0))
    while (part := file.readline(PIECE_SIZE)) and not part.endswith(b"\n"):
        pass
    return file.tell()


def _read(file: BinaryIO, start: int, end: int) -> Iterator[Piece]:
    """The bytes from `start` to `end` as pieces of about PIECE_SIZE bytes, whole lines unless they are longer than that."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # a byte order mark is no text
    file.seek(start)
    position = start
    while position < end:
        chunk = file.read(min(PIECE_SIZE, end - position))
        chunk += file.readline(min(PIECE_SIZE, end - position - len(chunk)))
        position += len(chunk)
        if not chunk:
            raise OSError(f"{file.name} became shorter while it was read; start again")
        yield Piece(decoder.decode(chunk, final=position == end), position == end)


def _json_rows(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number}: not json ({error}); a .jsonl file holds one json object a line"
                ) from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number}: a json object is needed, such as {{{text_field!r}: ...}}, not {line[:40]!r}"
                )
            yield number, row_text(row, text_field, f"{path}, line {number}")


def _parquet_rows(path: Path, text_field: str) -> Iterator[tuple[int, str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                row_text(dict.fromkeys(names), text_field, str(path))
            number = 0
            for batch in table.iter_batches(PARQUET_ROWS, columns=[text_field]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    yield number, row_text({text_field: text}, text_field, f"{path}, row {number}")
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is no parquet file, or damaged ({error}); copy or write it again") from error


def row_text(row: dict[str, Any], text_field: str, where: str) -> str:
    """The text of a row; "" for null.

    Raises:
        ValueError: the row has no such field, or it holds something else than text.
    """
    if text_field not in row:
        fields = ", ".join(row) or "none"
        raise ValueError(f"{where}: no field {text_field!r}; there are {fields}: choose one with data.text_field=NAME")
    text = row[text_field]
    if text is None:
        return ""
    if not isinstance(text, str):
        kind = type(text).__name__
        raise ValueError(
            f"{where}: the field {text_field!r} holds {kind}, not text; choose another with data.text_field=NAME"
        )
    # json can spell half of a surrogate pair, which is no character and which no tokenizer takes
    return text.encode("utf-8", "replace").decode("utf-8")
