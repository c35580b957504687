"""What a source of text is. A source yields documents; how they are split and cut into pieces stands here, once."""

import codecs
import hashlib
import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from tril.data.split import Plan

Split = Literal["train", "val"]

PIECE_SIZE = 1 << 18  # bytes; large enough to encode efficiently, small enough to give every core some pieces
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


class Piece(NamedTuple):
    """A document or a part of one, and whether its document ends with it."""

    text: str
    ends_document: bool


class Source:
    """Text with a training and a validation part: a group of settings, registered in `data.sources.SOURCES`.

    A source defines `name`, `fingerprint` and `documents`, and has the setting `val_fraction`.

    Attributes:
        name: a short slug, which begins the name of the folder in the cache.
        salt: put before the names of documents for their hashes.
        separate_val: names the setting with separate documents for validation; None: they are `val_fraction` of all.
        by_content: rows are split by a hash of their content, without being compared first.
        ends_documents: the end-of-text token is put after each document.
        n_bytes: of all files; a text of very many is only searched for equal documents.
        prompt: what a sample of a model of this text begins with, unless the user chooses; "": a new document.
    """

    name: str
    val_fraction: float
    salt = ""
    separate_val: str | None = None
    by_content = False
    ends_documents = True
    n_bytes = 0
    prompt = ""

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that change if the text or its split changes; computed at every start."""
        raise NotImplementedError

    def documents(self, split: Split) -> Iterator[Document]:
        """The documents, always in the same order; `split` matters only with `separate_val`."""
        raise NotImplementedError

    @property
    def split_rule(self) -> str:
        """How the text is split, for the user."""
        return self.separate_val or self._plan.rule

    def pieces(self, split: Split) -> Iterator[Piece]:
        """The text of one part, always in the same order, in pieces."""
        for document in self.documents(split):
            yield from cut(self._part(document, split), self.ends_documents)

    def _part(self, document: Document, split: Split) -> str:
        """The text of a document that is in `split`."""
        if self.separate_val is not None:
            return document.text
        return self._plan.part(document, split)  # pyright: ignore[reportArgumentType] one class, found under two names

    @cached_property
    def _plan(self) -> "Plan":
        from tril.data.split import BY_CONTENT, MAX_BYTES, Plan, plan_split

        if self.by_content:
            return Plan(self.val_fraction, None, True, BY_CONTENT)
        documents: Any = self.documents("train")
        return plan_split(documents, self.val_fraction, self.salt, compare=self.n_bytes <= MAX_BYTES)


def cut(text: str, ends_document: bool) -> Iterator[Piece]:
    """Cuts a text into pieces of about PIECE_SIZE bytes: whole lines, except for longer lines. None of ""."""
    data, start, decoder = text.encode(), 0, codecs.getincrementaldecoder("utf-8")()
    while start < len(data):
        end = start + PIECE_SIZE
        end = data.find(b"\n", end, end + PIECE_SIZE) + 1 or end + PIECE_SIZE
        yield Piece(decoder.decode(data[start:end]), ends_document and end >= len(data))
        start = end


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
