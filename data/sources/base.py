"""What a source of text is. It yields documents; `data/split.py` splits them and `data/prepare.py` tokenizes them."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Split = Literal["train", "val"]

HASH_LIMIT = 1 << 28  # bytes; larger files are identified by size and modification time, to keep later starts fast


class Document(NamedTuple):
    """A text that is in one part as a whole, if possible.

    Attributes:
        name: unique in its source; its hash decides the order in which documents are chosen for validation.
        is_row: it is compared without white space at its ends; one of too many is split by a hash of its content.
    """

    name: str
    text: str
    is_row: bool = False


class Source:
    """Text with a training and a validation part: a group of settings, registered in `data.sources.SOURCES`.

    A source defines `name`, `fingerprint` and `documents`, and has the setting `val_fraction`.

    Attributes:
        name: a short slug, which begins the name of the folder in the cache.
        salt: put before the names of documents for their hashes.
        own_split: `documents` yields the documents of one part, for the reason that this text gives; None: it yields
            all of them, of which Tril chooses `val_fraction` for validation.
        by_content: rows are split by a hash of their content, without being compared first.
        ends_documents: the end-of-text token is put after each document.
        note: a line about the documents that were read, for the user; "": there is nothing to say.
        prompt: what a sample of a model of this text begins with, unless the user chooses; "": a new document.
    """

    name: str
    val_fraction: float
    salt = ""
    own_split: str | None = None
    by_content = False
    ends_documents = True
    note = ""
    prompt = ""

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that change if the text or its split changes; computed at every start."""
        raise NotImplementedError

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents, always in the same order; `split` matters only with `own_split`."""
        raise NotImplementedError


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(files: Iterable[tuple[str, Path]]) -> str:
    """One sha256 of (name, path) pairs: of the names and the contents, see HASH_LIMIT."""
    total = hashlib.sha256()
    for name, path in files:
        stat = path.stat()
        is_large = stat.st_size > HASH_LIMIT
        content = f"{stat.st_size} bytes, changed {stat.st_mtime_ns}" if is_large else sha256_of_file(path)
        total.update(os.fsencode(f"{name}\0{content}\0"))
    return total.hexdigest()
