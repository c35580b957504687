"""A prepared text: its tokens, their documents and targets, and the bytes of its validation part."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tril.data.encoding import OPENS, TARGET
from tril.data.integrity import FLAGS, TOKENS
from tril.data.sources.base import Split

DECODED_TOKENS = 1 << 16  # tokens decoded at a time


@dataclass(frozen=True)
class PreparedText:
    """A prepared text: its folder, the content of meta.json, and its tokenizer."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def texts(self) -> dict[str, "PreparedText"]:
        """This text alone, as `PreparedMixture.texts` has several."""
        return {"": self}

    def tokens(self, split: Split) -> np.ndarray:
        """Token ids of one part, (number of tokens,), memory-mapped and read-only, in the dtype of the file."""
        both = np.memmap(self.folder / TOKENS, dtype=self.meta["dtype"], mode="r")
        return self._part(both, split)

    def targets(self, split: Split) -> np.ndarray | None:
        """Which tokens of one part of a chat are trained on, bool (number of tokens,); None: all."""
        return None if (flags := self._flags(split)) is None else flags & TARGET > 0

    def predicted(self, split: Split) -> np.ndarray:
        """The tokens of one part that are trained on, (M,)."""
        targets = self.targets(split)
        return self.tokens(split) if targets is None else self.tokens(split)[targets]

    def documents(self, split: Split) -> np.ndarray:
        """The document of each token of one part, counted from 0: (number of tokens,) int64.

        The end-of-text token belongs to the document that it starts. Of a chat, a conversation is a document.
        """
        if (flags := self._flags(split)) is not None:
            return np.cumsum(flags & OPENS > 0) - 1
        return np.cumsum(self.tokens(split) == self.meta["eot_id"])

    def _flags(self, split: Split) -> np.ndarray | None:
        """Of each token of one part, see `encoding.Encoded`, (number of tokens,)."""
        if "targets" not in self.meta:
            return None
        return self._part(np.memmap(self.folder / FLAGS, dtype=np.uint8, mode="r"), split)

    def _part(self, both: np.ndarray, split: Split) -> np.ndarray:
        middle = self.meta["counts"]["train"]["tokens"]
        return both[:middle] if split == "train" else both[middle:]


def val_bytes(prepared: PreparedText, n_targets: int) -> int:
    """UTF-8 bytes of the first `n_targets` predicted tokens of the validation part.

    They are those of the text where a part is read, as with trainer.limit_val_batches: bytes per token differ between
    documents. Of a part the bytes of the decoded tokens are counted, without end-of-text.
    """
    if n_targets >= n_predicted(prepared.meta, "val"):
        return prepared.meta["counts"]["val"]["bytes"]
    first = 0 if prepared.targets("val") is not None else 1  # of a document, the first token is not predicted
    tokens, size = prepared.predicted("val")[first:], 0
    for start in range(0, n_targets, DECODED_TOKENS):
        ids = tokens[start : min(start + DECODED_TOKENS, n_targets)]
        ids = ids[ids != prepared.meta["eot_id"]]
        size += len(prepared.tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode())
    return max(size, 1)


def val_bytes_per_token(meta: dict[str, Any]) -> float:
    """UTF-8 bytes of the validation part per predicted token, which converts nats per token into bits per byte."""
    return meta["counts"]["val"]["bytes"] / n_predicted(meta, "val")


def n_predicted(meta: dict[str, Any], split: Split) -> int:
    """Targets of one part: all tokens but the first of each text of a mixture, of a chat those of the answers."""
    n_texts = len(meta.get("sources", ())) or 1
    return meta["targets"][split] if "targets" in meta else meta["counts"][split]["tokens"] - n_texts
