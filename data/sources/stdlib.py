"""The source text of Python's standard library."""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from tril.data.cache import digest_files
from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Document, Source, Split

# Files differ in size and kind, so the order of their hashes decides how typical the first 10 % of the text are. This
# salt, one of the first 8000, gives at least 80 files on Python 3.11, 3.12 and 3.13, none above 12 % of the part, with
# packages and sizes mixed as in the whole. Of the text that 3.12 and 3.13 share with 3.11, 97 % and 91 % of what either
# validates on is validated on by both. It was chosen by names, sizes and packages; no model was used.
VAL_SALT = "5550:"
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}

MIN_TABLE_BYTES = 1000
TABLE_SHARE = 0.5
STRING = rb"""[bBuUrR]{0,2}(?:'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")"""
LITERALS = re.compile(rb"(?:[\s()\[\]{},:+-]|" + STRING + rb"|0[xX][\da-fA-F]+|\d[\d.eE]*|None|True|False)+(?:#.*)?")
GENERATED = re.compile(rb"\bgenerated (?:by|from|with)\b|\bauto-?generated\b", re.IGNORECASE)


@dataclass(frozen=True, config=strict_settings("data"))
class StandardLibrary(Source):
    """The Python files of the interpreter's standard library without its tests and tables: about 10 MB.

    A file is a document.
    """

    val_fraction: float = setting(
        0.1, "of the text: files in the order of a hash of their names", common=True, gt=0, lt=1
    )
    name = "stdlib"
    prompt = "import os\n\n\ndef "

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

    def documents(self, split: Split) -> Iterator[Document]:
        for name, path in self.files():
            if not is_table(content := path.read_bytes()):
                text = content.decode("utf-8", errors="replace")  # a few are deliberately not UTF-8
                yield Document(VAL_SALT + name, text)


def is_table(source: bytes) -> bool:
    """Whether a Python file is mostly data: generated, or more than TABLE_SHARE of it in lines of literals alone.

    Comments and blank lines do not count. Small files are no tables.
    """
    if len(source) < MIN_TABLE_BYTES:
        return False
    lines = [line.strip() for line in source.splitlines()]
    code = [line for line in lines if line and not line.startswith(b"#")]
    literal = sum(len(line) for line in code if LITERALS.fullmatch(line))
    is_marked = GENERATED.search(b" ".join(lines[:3])) is not None
    return is_marked or literal > TABLE_SHARE * sum(map(len, code))
