"""The user's own files: texts, and tables, in which every row is a document; or one text, split by position."""

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import digest_files, read_or_write, resolve_cache_dir, sha256_of_file
from tril.data.settings import printable, setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.rows import UnreadableError, parser_of, read_documents

RULES = 2  # incremented when files are read in another way
SHOWN_ENDINGS = 5

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT = 30  # seconds without an answer


@dataclass(frozen=True, config=strict_settings("data"))
class Files(Source):
    """Text files, and the rows of tables, see `tril.data.sources.rows`. A file of text is a document, and so is a row.

    A file that a pattern names by its path must hold text; of the others, hidden files and those without text are left
    out. The names of documents are relative to the common folder of all files, so that moving it does not change the
    split.
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
        paths = [path for files in self.files.values() for _, path in files]
        if self.text_field != "text" and not any(map(parser_of, paths)):
            cause = "has no effect on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} {cause}; leave it out")
        return self

    @property
    def own_split(self) -> str | None:
        return None if self.val_path is None else "data.val_path"

    @cached_property
    def files(self) -> dict[Split, list[tuple[str, Path]]]:
        """The files that contain a part, sorted, each after its name.

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
        endings = Counter(path.suffix or "without an ending" for path in sorted(self.left_out))
        listed = printable(", ".join(f"{count} {ending}" for ending, count in endings.most_common(SHOWN_ENDINGS)))
        total = len({path for files in self.files.values() for _, path in files})
        return f"left out {len(self.left_out)} of {total} files, which hold no text, such as {listed}"

    def documents(self, split: Split) -> Iterator[Document]:
        given = {expanded(pattern) for pattern in (*listed(self.path), *listed(self.val_path))}
        for name, path in self.files[split]:
            n_characters = 0
            try:
                for document in read_documents(name, path, self.text_field):
                    n_characters += len(document.text)
                    yield document
            except UnreadableError:
                if path in given or n_characters:
                    raise
                self.left_out.add(path)
            if path in given and n_characters == 0:
                raise ValueError(f"{printable(path)} is empty; leave it out of data.path and data.val_path")


def listed(patterns: str | list[str] | None) -> list[str]:
    return [patterns] if isinstance(patterns, str) else patterns or []


def expanded(pattern: str) -> Path:
    return Path(os.path.expanduser(pattern))


def find(key: str, patterns: str | list[str] | None) -> list[Path]:
    """The files that `patterns`, the setting data.`key`, match, sorted: a file, a folder, a glob, or a list of them.

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


def matching(pattern: str) -> Iterator[Path]:
    """The paths that a glob matches, without names that begin with a dot; "**" follows links to folders."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.glob(pattern))
        return
    i = parts.index("**")
    for folder in folders_below(glob.glob(str(Path(*parts[:i])))):
        yield from matching(os.path.join(glob.escape(folder), *(parts[i + 1 :] or ["*"])))


def folders_below(tops: Iterable[str]) -> Iterator[str]:
    """Folders and all that are below them and not hidden; each once, also if links lead to it again."""
    known = set[str]()
    for folder, subfolders, _ in chain.from_iterable(os.walk(top, followlinks=True) for top in tops):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        if (real := os.path.realpath(folder)) in known:
            subfolders.clear()
        else:
            known.add(real)
            yield folder


@dataclass(frozen=True, config=strict_settings("data"))
class SingleText(Source):
    """One text, of which the first int(n (1 - val_fraction)) of n characters are for training, the rest for validation.

    This is nanoGPT's split of tiny shakespeare. No end-of-text token is inserted.
    """

    path: str | None = setting(
        None, "a text file; null: tiny shakespeare, downloaded once into the cache folder", common=True
    )
    val_fraction: float = setting(0.1, "the end of the text", common=True, gt=0, lt=1)
    name = "shakespeare"
    own_split = "the end of the text"
    ends_documents = False

    @model_validator(mode="after")
    def _check_path(self) -> "SingleText":
        if self.path is not None and not expanded(self.path).is_file():
            raise OSError(f"data.path={self.path} does not exist; give a text file, or null to download it")
        return self

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.name, "sha256": sha256_of_file(self._file()), "val_fraction": self.val_fraction}

    def documents(self, split: Split) -> Iterator[Document]:
        text = "".join(document.text for document in read_documents("text", self._file(), "text"))
        middle = int(len(text) * (1 - self.val_fraction))
        yield Document("text", text[:middle] if split == "train" else text[middle:])

    def _file(self) -> Path:
        if self.path is not None:
            return expanded(self.path)
        download = resolve_cache_dir(self.cache_dir) / "shakespeare.txt"
        read_or_write(download, "downloads", _download, Path.stat)
        return download


def _download(part: Path) -> None:
    """
    Raises:
        OSError: the server cannot be reached, or has another text.
    """
    import urllib.request

    try:
        with urllib.request.urlopen(URL, timeout=TIMEOUT) as response:
            part.write_bytes(response.read())
        if sha256_of_file(part) != SHA256:
            raise OSError("it has another text than tiny shakespeare")
    except OSError as error:
        raise OSError(f"cannot download {URL} ({error}); download the text and pass data.path=FILE") from error
