"""What a source of text is. It yields documents; `data/split.py` splits them and `data/prepare.py` tokenizes them."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Split = Literal["train", "val"]


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
