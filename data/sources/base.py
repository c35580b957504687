"""Where text comes from: what every source offers, and the two sources of one fixed text.

A source hands out a split of its text as pieces. A piece is a document or, so that memory stays flat however large a document
is, a part of one that ends at a line end.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Split = Literal["train", "val"]
PIECE_SIZE = (
    1 << 18
)  # characters; large enough to be encoded efficiently, small enough that a batch of them feeds every core
HASH_LIMIT = (
    1 << 28
)  # bytes; larger files are told apart by size and time of change, so that a second start stays quick


class Piece(NamedTuple):
    """Some text, and whether its document ends with it."""

    text: str
    ends_document: bool


class Source(Protocol):
    """Text in two parts.

    name: a short slug, part of the name of the cache folder.
    fingerprint: plain json that changes whenever the text or its split does; cheap enough for every start.
    pieces: the text of one part, in an order that never changes.
    """

    @property
    def name(self) -> str: ...

    def fingerprint(self) -> dict[str, Any]: ...

    def pieces(self, split: Split) -> Iterator[Piece]: ...


def cut(text: str, ends_document: bool = True) -> Iterator[Piece]:
    """A text as pieces of at most PIECE_SIZE characters, each ending at a line end if there is one. Nothing for ""."""
    start = 0
    while len(text) - start > PIECE_SIZE:
        line_end = text.rfind("\n", start, start + PIECE_SIZE) + 1
        end = line_end or start + PIECE_SIZE
        yield Piece(text[start:end], False)
        start = end
    if text:
        yield Piece(text[start:], ends_document)


def in_split(key: str, split: Split, val_fraction: float) -> bool:
    """Whether the document `key` is in `split`: decided by a hash of the key alone, the same on every machine."""
    digest = hashlib.sha256(os.fsencode(key)).digest()
    is_val = int.from_bytes(digest[:8], "big") < val_fraction * 2**64
    return is_val == (split == "val")


def digest_files(paths: Iterable[tuple[str, Path]]) -> str:
    """One sha256 of (name, content) pairs; a file above HASH_LIMIT counts with its size and time of change instead."""
    total = hashlib.sha256()
    for name, path in paths:
        stat = path.stat()
        if stat.st_size > HASH_LIMIT:
            content = f"{stat.st_size} bytes, changed {stat.st_mtime_ns}"
        else:
            with path.open("rb") as file:  # piece by piece: memory stays flat
                content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(os.fsencode(f"{name}\0{content}\0"))
    return total.hexdigest()


def check_fraction(val_fraction: object) -> None:
    """Raises ValueError unless 0 < val_fraction < 1."""
    is_number = isinstance(val_fraction, float | int) and not isinstance(val_fraction, bool)
    if not (is_number and 0 < val_fraction < 1):
        raise ValueError(
            f"data.val_fraction={val_fraction}: the validation part must be a number above 0 and below 1, such as 0.05"
        )
