"""The user's own files: texts, and tables, in which every row is a document."""

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import digest_files
from tril.data.settings import printable, setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.rows import UnreadableError, read_documents, table_reader

RULES = 2  # incremented when files are read in another way
SHOWN_ENDINGS = 5

Paths = str | list[str] | None  # a file, a folder, a glob, or a list of them


@dataclass(frozen=True, config=strict_settings("data"))
class Files(Source):
    """Text files, and the rows of tables, see `tril.data.sources.rows`. A file of text is a document, and so is a row.

    A file that is named by its path must hold text. Of the files of folders and globs, Tril leaves out those that are
    hidden or hold no text. The names of documents are relative to the common folder of all files, so that moving it
    does not change the split.
    """

    path: Paths = setting(
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
    val_path: Paths = setting(None, "files to validate on, excluded from `path`; null: a part of `path`", common=True)
    name = "files"

    @model_validator(mode="after")
    def _check(self) -> "Files":
        paths = [*chain.from_iterable(files.values() for files in self.files.values())]  # raises where a path is wrong
        if self.text_field != "text" and not any(map(table_reader, paths)):
            cause = "has no effect on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} {cause}; leave it out")
        return self

    @property
    def own_split(self) -> str | None:
        return None if self.val_path is None else "data.val_path"

    @cached_property
    def files(self) -> dict[Split, dict[str, Path]]:
        """The files that contain a part, sorted, by the names of their documents.

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

        def named(paths: list[Path]) -> dict[str, Path]:
            common = os.path.commonpath([path.parent for path in paths])
            return {os.path.relpath(path, common): path for path in paths}

        return {"train": named(train), "val": named(val)}

    def fingerprint(self) -> dict[str, Any]:
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{split} {name}", path) for split in splits for name, path in self.files[split].items()]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        split = {"val_path": True} if self.own_split else {"val_fraction": self.val_fraction}
        return {"rules": RULES} | common | split

    def documents(self, split: Split) -> Iterator[Document]:
        named = {expanded(pattern) for pattern in (*listed(self.path), *listed(self.val_path))}
        for name, path in self.files[split].items():
            n_characters = 0
            try:
                for document in read_documents(name, path, self.text_field):
                    n_characters += len(document.text)
                    yield document
                if path in named and n_characters == 0:
                    raise UnreadableError(f"{printable(path)} is empty; leave it out of data.path and data.val_path")
            except UnreadableError:
                if path in named or n_characters:
                    raise
                self.left_out.add(path)

    @cached_property
    def left_out(self) -> set[Path]:
        """The files that `documents` has left out so far, since they hold no text."""
        return set()

    @property
    def note(self) -> str:
        if not self.left_out:
            return ""
        endings = Counter(path.suffix or "without an ending" for path in sorted(self.left_out))
        shown = printable(", ".join(f"{count} {ending}" for ending, count in endings.most_common(SHOWN_ENDINGS)))
        total = len({*chain.from_iterable(files.values() for files in self.files.values())})
        return f"left out {len(self.left_out)} of {total} files, which hold no text, such as {shown}"


def find(key: str, patterns: Paths) -> list[Path]:
    """The files that `patterns`, the setting data.`key`, match, sorted.

    Raises:
        ValueError: no pattern.
        OSError: a pattern matches nothing.
    """
    if not patterns or not all(listed(patterns)):
        raise ValueError(f"data.{key} is missing; give a file, a folder or a glob, such as data.{key}='texts/**/*.txt'")
    found = set[Path]()
    for pattern in listed(patterns):
        path = expanded(pattern)  # a file or a folder may have the name of a glob
        paths = [path] if path.is_file() else matching(f"{glob.escape(str(path))}/**" if path.is_dir() else str(path))
        files = {each for each in paths if each.is_file()}  # no folders, pipes or devices
        if not files:
            raise OSError(f"data.{key}={printable(pattern)} matches no file; give a file, a folder or a glob")
        found |= files
    return sorted(found)


def listed(patterns: Paths) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns or []


def expanded(pattern: str) -> Path:
    return Path(os.path.expanduser(pattern))


def matching(pattern: str) -> Iterator[Path]:
    """The paths that a glob matches, without names that begin with a dot; "**" follows links to folders."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.glob(pattern))
        return
    i = parts.index("**")
    for folder in folders_below(glob.glob(str(Path(*parts[:i])))):
        yield from matching(os.path.join(glob.escape(folder), *(parts[i + 1 :] or ["*"])))


def folders_below(tops: Sequence[str]) -> Iterator[str]:
    """Folders and all that are below them and not hidden; each once, and none that links name above them."""
    known, above = set[str](), {str(path) for top in tops for path in Path(os.path.realpath(top)).parents}
    for folder, subfolders, _ in chain.from_iterable(os.walk(top, followlinks=True) for top in tops):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if (real := os.path.realpath(folder)) in known or (real in above and folder not in tops):
            subfolders.clear()
        else:
            known.add(real)
            yield folder
