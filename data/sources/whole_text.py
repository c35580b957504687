"""All text of some files as the validation part, to measure a model on text that it was trained on before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tril.data.sources.base import Piece, Split
from tril.data.sources.files import Files


@dataclass(frozen=True)
class WholeText:
    """A source whose validation part is all of `files`; its training part is one character, since none may be empty."""

    files: Files
    name = "whole-text"
    split_rule = "the whole text"
    max_overlap = None

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": self.name, "files": self.files.fingerprint()}

    def pieces(self, split: Split) -> Iterator[Piece]:
        if split == "val":
            yield from self.files.all_pieces()
        else:
            text = next((piece.text for piece in self.files.all_pieces() if piece.text), "")
            yield Piece(text[:1], True)
