"""The interface of a text source, and what the sources share.

A source provides its text as pieces. A piece is a document or a part of one: long documents are cut at line ends, so
that memory stays flat.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Split = Literal["train", "val"]

PIECE_SIZE = 1 << 18  # characters: large enough to encode efficiently, small enough to give every core some pieces
HASH_LIMIT = 1 << 28  # bytes; larger files are identified by size and modification time, to keep later starts fast


class Turn(NamedTuple):
    """A part of a conversation, with special tokens as text, and whether its tokens are targets."""

    text: str
    is_target: bool


class Piece(NamedTuple):
    """Some text, and whether its document ends with it.

    A conversation is one piece with `turns`: (end-of-text token, all special tokens) -> what to encode in its place.
    """

    text: str
    ends_document: bool
    turns: Callable[[str, Collection[str]], list[Turn]] | None = None


class Source(Protocol):
    """Text with a training and a validation part: a group of settings, registered in `data.sources.SOURCES`.

    A source whose pieces have `turns` also has `is_chat`, which is True.
    """

    @property
    def name(self) -> str:
        """A short slug, which begins the name of the folder in the cache."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON values that change if the text or its split changes; computed at every start."""
        ...

    def pieces(self, split: Split) -> Iterator[Piece]:
        """The text of one part, always in the same order."""
        ...

    @property
    def split_rule(self) -> str:
        """How the text is split, for the user; available after `pieces` has been read."""
        ...


def cut(text: str, ends_document: bool = True) -> Iterator[Piece]:
    """Cuts a text into pieces of at most PIECE_SIZE characters, at line ends where possible. Yields nothing for ""."""
    start = 0
    while len(text) - start > PIECE_SIZE:
        line_end = text.rfind("\n", start, start + PIECE_SIZE) + 1
        end = line_end or start + PIECE_SIZE
        yield Piece(text[start:end], False)
        start = end
    if text:
        yield Piece(text[start:], ends_document)


def printable(text: object) -> str:
    """The text in one line: names of files may hold line breaks, control characters and bytes that are not UTF-8."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(text))


def digest_files(files: Iterable[tuple[str, Path]]) -> str:
    """One sha256 of (name, path) pairs: of the names and the contents, see HASH_LIMIT."""
    total = hashlib.sha256()
    for name, path in files:
        stat = path.stat()
        if stat.st_size > HASH_LIMIT:
            content = f"{stat.st_size} bytes, changed {stat.st_mtime_ns}"
        else:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(os.fsencode(f"{name}\0{content}\0"))
    return total.hexdigest()
