"""The user's own files: texts, and tables, in which every row is a document; or one text, split by position."""

import fnmatch
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import digest_files, read_or_write, resolve_cache_dir, sha256_of_file
from tril.data.settings import printable, setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.rows import UnreadableError, kind_of, read_rows, read_text

RULES = 2  # incremented when files are read in another way
MANY_ENDINGS = 5

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT = 30  # seconds without an answer


class Found(NamedTuple):
    """A file of data.path.

    Attributes:
        name: relative to the common folder of all files.
        is_named: by its path, and not by a folder or a glob. Then it is an error if Tril cannot read it.
    """

    name: str
    path: Path
    is_named: bool


@dataclass(frozen=True, config=strict_settings("data"))
class Files(Source):
    """Text files, and the rows of tables, see `tril.data.sources.rows`. A file of text is a document, and so is a row.

    Of a folder or a glob, hidden files and those that hold no text are left out. The names of documents are relative to
    the common folder of all files, so that moving it does not change the split.
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
        paths = {found.path for files in self.files.values() for found in files}
        if self.text_field != "text" and all(kind_of(path) == "text" for path in paths):
            cause = "has no effect on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} {cause}; leave it out")
        return self

    @property
    def own_split(self) -> str | None:
        return None if self.val_path is None else "data.val_path"

    @cached_property
    def files(self) -> dict[Split, list[Found]]:
        """The files that contain a part, sorted.

        Raises:
            ValueError: `val_path` matches all files of `path`.
            OSError: `path` or `val_path` matches nothing.
        """
        train = val = find("path", self.path)
        if self.val_path is not None:
            val = find("val_path", self.val_path)
            excluded = {path.resolve() for path in val}
            train = {path: is_named for path, is_named in train.items() if path.resolve() not in excluded}
        if not train:
            cause = f"data.val_path={self.val_path} matches every file of data.path={self.path}"
            raise ValueError(f"{cause}; leave some to train on")

        def named(paths: dict[Path, bool]) -> list[Found]:
            common = os.path.commonpath([path.parent for path in paths])
            return [Found(os.path.relpath(path, common), path, paths[path]) for path in sorted(paths)]

        return {"train": named(train), "val": named(val)}

    def fingerprint(self) -> dict[str, Any]:
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{split} {found.name}", found.path) for split in splits for found in self.files[split]]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        split = {"val_path": True} if self.own_split else {"val_fraction": self.val_fraction}
        return {"rules": RULES} | common | split

    @cached_property
    def left_out(self) -> set[Path]:
        """The files that `documents` has left out so far, since they hold no text."""
        return set()

    @property
    def note(self) -> str:
        if not self.left_out:
            return ""
        counts = Counter(path.suffix or "without an ending" for path in self.left_out)
        endings = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{count} {ending}" for ending, count in endings[:MANY_ENDINGS]]
        rest = sum(count for _, count in endings[MANY_ENDINGS:])
        listed = printable(", ".join(shown + [f"{rest} others"] * bool(rest)))
        total = len({found.path for files in self.files.values() for found in files})
        return f"left out {len(self.left_out)} of {total} files, which hold no text: {listed}"

    def documents(self, split: Split) -> Iterator[Document]:
        for found in self.files[split]:
            n_characters = 0
            try:
                for document in documents_of(found, self.text_field):
                    n_characters += len(document.text)
                    yield document
            except UnreadableError:
                if found.is_named or n_characters:
                    raise
                self.left_out.add(found.path)
            if found.is_named and n_characters == 0:
                raise ValueError(
                    f"{printable(found.path)} is empty; leave it out of the settings data.path and data.val_path"
                )


def documents_of(found: Found, text_field: str) -> Iterator[Document]:
    """The text of a file, or those of its rows, which have names such as "a.csv:3"."""
    if (kind := kind_of(found.path)) == "text":
        yield Document(found.name, read_text(found.path))
        return
    for number, text in enumerate(read_rows(found.path, kind, text_field), start=1):
        yield Document(f"{found.name}:{number}", text, is_row=True)


def find(key: str, pattern: str | list[str] | None) -> dict[Path, bool]:
    """The files that `pattern`, the setting data.`key`, matches: a file, a folder, a glob, or a list of them.

    Folders and globs leave out names that begin with a dot, and follow links to folders.

    Returns:
        The files, each with whether it is named by its path.

    Raises:
        ValueError: no pattern.
        OSError: it matches nothing.
    """
    if isinstance(pattern, list) and pattern:
        found = [find(key, each) for each in pattern]
        return {path: any(each.get(path) for each in found) for files in found for path in files}
    if not pattern or not isinstance(pattern, str):
        raise ValueError(f"data.{key} is missing; give a file, a folder or a glob, such as data.{key}='texts/**/*.txt'")
    path = Path(pattern).expanduser()
    if path.is_file():
        return {path: True}
    parts = path.parts
    first = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    first = len(parts) if path.is_dir() else first  # a folder may have such a name
    folder, names = Path(*parts[:first]), parts[first:] or ("**",)
    files = dict.fromkeys(matching(folder, names), False)
    if not files:
        raise OSError(f"data.{key}={printable(pattern)} matches no file; give a file, a folder or a glob")
    return files


def matching(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """The files below a folder that are not hidden and match a glob; each once, also if links lead to it again.

    Args:
        names: the parts of the glob; "**" stands for any number of folders, and for all files at the end.
    """
    known: set[str] = set()
    for path, subfolders, files in os.walk(folder, followlinks=True):
        parts = Path(path).relative_to(folder).parts
        if (real := os.path.realpath(path)) in known or ("**" not in names and len(parts) >= len(names)):
            subfolders.clear()
            continue
        known.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in files:
            file = Path(path, name)
            if not name.startswith(".") and matches((*parts, name), names) and file.is_file():  # no pipes or devices
                yield file


def matches(parts: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the parts of a path match the parts of a glob."""
    if not names or not parts:
        return not parts and set(names) <= {"**"}
    if names[0] == "**":
        return len(names) == 1 or any(matches(parts[i:], names[1:]) for i in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], names[0]) and matches(parts[1:], names[1:])


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
    own_split = "the end of the text"
    ends_documents = False

    @model_validator(mode="after")
    def _check_path(self) -> "SingleText":
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise OSError(f"data.path={self.path} does not exist; give a text file, or null to download it")
        return self

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.name, "sha256": sha256_of_file(self._file()), "val_fraction": self.val_fraction}

    def documents(self, split: Split) -> Iterator[Document]:
        text = read_text(self._file())
        middle = int(len(text) * (1 - self.val_fraction))
        yield Document("text", text[:middle] if split == "train" else text[middle:])

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
