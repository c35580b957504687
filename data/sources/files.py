"""The user's own files: texts, and files of rows, in which every row is a document; or one text, split by position.

A file of rows is known by its name; any other is UTF-8 text.
"""

import contextlib
import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import read_or_write, resolve_cache_dir
from tril.data.settings import printable, setting, strict_settings
from tril.data.sources.base import Document, Source, Split, digest_files, sha256_of_file

ROWS = (".jsonl", ".json", ".csv", ".parquet")  # all but .parquet also with .gz
LIMIT = 1 << 32  # bytes of a file that is read as a whole: text, and .json
FIELD_LIMIT = 1 << 27  # characters of a field of a .csv file
PARQUET_ROWS = 16  # decoded at a time
SHOWN_FIELDS = 20

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True, config=strict_settings("data"))
class Files(Source):
    """UTF-8 text files, and rows of .jsonl, .json, .csv (all also with .gz) and .parquet. A file of text is a document,
    and so is a row. The names of documents are relative to the common folder of all files, so that moving it does not
    change the split.
    """

    path: str | list[str] | None = setting(
        None,
        "a file, a folder (searched to every depth), a glob in quotes, or a list: '[a.txt,notes/*.md]'",
        common=True,
    )
    text_field: str = setting("text", "the key or column that holds the text of a row")
    val_fraction: float = setting(
        0.05,
        "of the text: whole files and rows if possible, else the end of each",
        common=True,
        needs="val_path=null",
        gt=0,
        lt=1,
    )
    val_path: str | list[str] | None = setting(
        None, "files to validate on, excluded from `path`; null: a part of `path`", common=True
    )
    name = "files"

    @model_validator(mode="after")
    def _check(self) -> "Files":
        paths = {path for files in self.files.values() for _, path in files}
        if self.text_field != "text" and not any(map(has_rows, paths)):
            cause = "has no effect on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} {cause}; leave it out")
        return self

    @property
    def separate_val(self) -> str | None:
        return None if self.val_path is None else "data.val_path"

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in self.files["train"])

    @cached_property
    def files(self) -> dict[Split, list[tuple[str, Path]]]:
        """(path relative to the common folder, path) of the files that contain a part, sorted.

        Raises:
            ValueError: `val_path` matches all files of `path`.
            OSError: `path` or `val_path` matches nothing.
        """
        train = val = find("path", self.path)
        if self.val_path is not None:
            val = find("val_path", self.val_path)
            excluded = {path.resolve() for path in val}
            train = [path for path in train if path.resolve() not in excluded]
        if not train:
            cause = f"data.val_path={self.val_path} matches every file of data.path={self.path}"
            raise ValueError(f"{cause}; leave some to train on")

        def named(paths: list[Path]) -> list[tuple[str, Path]]:
            common = os.path.commonpath([path.parent for path in paths])
            return [(os.path.relpath(path, common), path) for path in paths]

        return {"train": named(train), "val": named(val)}

    def fingerprint(self) -> dict[str, Any]:
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{split} {name}", path) for split in splits for name, path in self.files[split]]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        return common | ({"val_fraction": self.val_fraction} if self.val_path is None else {"val_path": True})

    def documents(self, split: Split) -> Iterator[Document]:
        for name, path in self.files[split]:
            if has_rows(path):
                for number, text in enumerate(read_rows(path, self.text_field), start=1):
                    yield Document(f"{name}:{number}", text, is_row=True)
            else:
                yield Document(name, read_text(path))


@dataclass(frozen=True, config=strict_settings("data"))
class SingleText(Source):
    """One text, of which the first int(n (1 - val_fraction)) of n characters are for training, the rest for validation.

    This is nanoGPT's split of tiny shakespeare. No end-of-text token is inserted.
    """

    path: str | None = setting(
        None, "a text file; null: tiny shakespeare, downloaded once into the cache folder", common=True
    )
    val_fraction: float = setting(0.1, "the end of the text", common=True, gt=0, lt=1)
    cache_dir: str | None = field(default=None, compare=False)
    name = "shakespeare"
    ends_documents = False

    @model_validator(mode="after")
    def _check_path(self) -> "SingleText":
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise OSError(f"data.path={self.path} does not exist; give a text file, or null to download it")
        return self

    @property
    def split_rule(self) -> str:
        return "the end of the text"

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.name, "sha256": sha256_of_file(self._file()), "val_fraction": self.val_fraction}

    def documents(self, split: Split) -> Iterator[Document]:
        yield Document("text", read_text(self._file()))

    def _part(self, document: Document, split: Split) -> str:
        middle = int(len(document.text) * (1 - self.val_fraction))
        return document.text[:middle] if split == "train" else document.text[middle:]

    def _file(self) -> Path:
        if self.path is not None:
            return Path(self.path).expanduser()
        download = resolve_cache_dir(self.cache_dir) / "shakespeare.txt"
        if not download.exists():
            read_or_write(download, "downloads", lambda part: part.write_bytes(_download()), Path.stat)
        return download


def _download() -> bytes:
    """
    Raises:
        OSError: the server cannot be reached, or has another text.
    """
    import urllib.request

    remedy = "download the text and pass data.path=FILE"
    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as response:
            content = response.read()
    except OSError as error:
        raise OSError(f"cannot download {URL} ({error}); {remedy}") from error
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise OSError(f"{URL} has another text than tiny shakespeare; {remedy}")
    return content


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


def open_file(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else path.open("rb")


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


def read_rows(path: Path, text_field: str) -> Iterator[str]:
    """The text of each row of a file, in order; "" for null. Empty lines are no rows.

    Args:
        text_field: the field that holds it. In a .json file, a text stands for an object with it.

    Raises:
        ValueError: a row cannot be read or has no text; the message names it, as in "a.csv, row 3".
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    where, number = f"{printable(path)}, {'line' if kind == '.jsonl' else 'row'}", 0
    try:
        with reading(path):
            for number, row in enumerate(_rows(path, kind, text_field), start=1):
                if isinstance(row, str):
                    row = {text_field: row}
                if isinstance(row, dict):
                    yield row_text(row, text_field, f"{where} {number}")
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
    return (text or "").encode("utf-8", "replace").decode()  # JSON can hold halves of surrogate pairs
