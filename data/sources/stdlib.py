"""The source text of Python's standard library."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tril.data.sources.base import Piece, Split, check_fraction, cut, digest_files, in_split

# The standard library's files differ so much that a hash may put 2 % or 11 % of the text into validation, mostly one file, or mostly
# tables. Of the salts below 3000 this one gives 5 % of it on Python 3.11, 3.12 and 3.13, no file with more than 15 % of that, and
# nearly the mixture of packages and file sizes of the whole. No model was asked.
VAL_SALT = 603


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
        return {
            "kind": self.name,
            "python": version,
            "sha256": digest_files(self.files()),
            "val_fraction": self.val_fraction,
        }

    def pieces(self, split: Split) -> Iterator[Piece]:
        for name, path in self.files():
            if in_split(f"{VAL_SALT}:{name}", split, self.val_fraction):
                # A few files are deliberately not UTF-8: a replacement character is a fair reading of those.
                yield from cut(path.read_bytes().decode("utf-8", errors="replace"))
