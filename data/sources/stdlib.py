"""The source text of Python's standard library."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from tril.data.sources.base import SETTINGS, Piece, Split, ValFraction, cut, digest_files, in_split

# The files differ so much in size and kind that a hash can put 2 % or 11 % of the text into validation, mostly from one
# file, or mostly tables. With this salt, one of the first 3000, it is 5 % on Python 3.11, 3.12 and 3.13, at most 15 %
# of that from one file, and packages and file sizes are mixed almost as in the whole. No model was used to choose it.
VAL_SALT = 603
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}


@dataclass(frozen=True, config=SETTINGS)
class StandardLibrary:
    """The Python files of the interpreter's standard library without its tests: about 12 MB on every machine.

    A file is a document. A hash of its relative path puts about `val_fraction` of the files into validation.
    """

    val_fraction: ValFraction = 0.05
    name = "stdlib"

    def files(self) -> list[tuple[str, Path]]:
        """(relative POSIX path, path) of every file, sorted."""
        root = Path(sysconfig.get_paths()["stdlib"])
        paths: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in SKIPPED and not name.startswith("config-")]
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        return sorted((path.relative_to(root).as_posix(), path) for path in paths)

    def fingerprint(self) -> dict[str, Any]:
        version = ".".join(map(str, sys.version_info[:3]))
        text = {"python": version, "sha256": digest_files(self.files())}
        return {"kind": self.name, "val_fraction": self.val_fraction, **text}

    def pieces(self, split: Split) -> Iterator[Piece]:
        for name, path in self.files():
            if in_split(f"{VAL_SALT}:{name}", split, self.val_fraction):
                # a few files are deliberately not UTF-8
                yield from cut(path.read_bytes().decode("utf-8", errors="replace"))
