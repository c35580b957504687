"""Where text comes from: what every source offers, and the two sources of one fixed text.

A source hands out a split of its text as pieces. A piece is a document or, so that memory stays flat however large a document
is, a part of one that ends at a line end.
"""

import hashlib
import os
import sys
import sysconfig
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from data.cache import default_cache_dir, write_file

Split = Literal["train", "val"]
PIECE_SIZE = 1 << 18  # characters; large enough to be encoded efficiently, small enough that a batch of them feeds every core
HASH_LIMIT = 1 << 28  # bytes; larger files are told apart by size and time of change, so that a second start stays quick
DOWNLOAD_TIMEOUT = 30  # seconds without an answer
# The standard library's files differ so much that a hash may put 2 % or 11 % of the text into validation, mostly one file, or mostly
# tables. Of the salts below 3000 this one gives 5 % of it on Python 3.11, 3.12 and 3.13, no file with more than 15 % of that, and
# nearly the mixture of packages and file sizes of the whole. No model was asked.
VAL_SALT = 603


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
        raise ValueError(f"data.val_fraction={val_fraction}: the validation part must be a number above 0 and below 1, such as 0.05")


@dataclass(frozen=True)
class StandardLibrary:
    """The Python source text of the running interpreter's standard library, without its tests: about 12 MB on every machine.

    Each file is a document; a hash of its relative name puts about `val_fraction` of the files into validation.
    """

    val_fraction: float = 0.05
    name = "stdlib"
    skipped = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"})

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)

    def files(self) -> list[tuple[str, Path]]:
        """(relative POSIX name, path) of every file, sorted by name."""
        root = Path(sysconfig.get_paths()["stdlib"])
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in self.skipped and not name.startswith("config-")]
            found += [Path(folder) / name for name in names if name.endswith(".py")]
        return sorted((path.relative_to(root).as_posix(), path) for path in found)

    def fingerprint(self) -> dict[str, Any]:
        version = ".".join(map(str, sys.version_info[:3]))
        return {"kind": self.name, "python": version, "sha256": digest_files(self.files()), "val_fraction": self.val_fraction}

    def pieces(self, split: Split) -> Iterator[Piece]:
        for name, path in self.files():
            if in_split(f"{VAL_SALT}:{name}", split, self.val_fraction):
                # A few files are deliberately not UTF-8: a replacement character is a fair reading of those.
                yield from cut(path.read_bytes().decode("utf-8", errors="replace"))


@dataclass(frozen=True)
class Shakespeare:
    """One text, split by position: the first int(n (1 - val_fraction)) of its n characters train, the rest validates.

    That is nanoGPT's split, and like there no end-of-text is put at the cut or at the end. The text is held in memory.

    path: a UTF-8 file; None downloads `url` once into `cache_dir`.
    sha256: what the downloaded file must hash to; None accepts anything.
    """

    path: str | None = None
    url: str = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    sha256: str | None = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
    val_fraction: float = 0.1
    cache_dir: str | None = field(default=None, compare=False)
    name = "shakespeare"

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)
        if self.path is not None and not Path(self.path).expanduser().is_file():
            raise OSError(f"data.path={self.path}: no such file; give a text file, or null to download it")

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.name, "sha256": hashlib.sha256(self._content()).hexdigest(), "val_fraction": self.val_fraction}

    def pieces(self, split: Split) -> Iterator[Piece]:
        try:
            text = self._content().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"data.path={self.path}: not UTF-8 at byte {error.start}; convert the file to UTF-8 first") from error
        middle = int(len(text) * (1 - self.val_fraction))
        yield from cut(text[:middle] if split == "train" else text[middle:], ends_document=False)

    def _content(self) -> bytes:
        if self.path is not None:
            return Path(self.path).expanduser().read_bytes()
        # The name carries the address: another url never finds this one's file.
        name = f"shakespeare-{hashlib.sha256(self.url.encode()).hexdigest()[:16]}.txt"
        folder = Path(self.cache_dir).expanduser() if self.cache_dir else default_cache_dir()
        if not (folder / name).exists():
            write_file(folder / name, self._download())
        return (folder / name).read_bytes()

    def _download(self) -> bytes:
        try:
            with urllib.request.urlopen(self.url, timeout=DOWNLOAD_TIMEOUT) as answer:
                content = answer.read()
        except (OSError, ValueError) as error:  # ValueError: not an address at all
            raise OSError(f"cannot download {self.url} ({error}); fetch the text some other way and pass data.path=FILE") from error
        found = hashlib.sha256(content).hexdigest()
        if self.sha256 is not None and found != self.sha256:
            raise OSError(
                f"{self.url} has changed: its sha256 is {found}, not {self.sha256}; pass data.path=FILE, or data.sha256=null to accept it"
            )
        return content
