"""The prepared text of a run: its tokens and documents, and the bytes of its validation part.

A prepared folder holds tokens.bin (the training part, then the validation part), tokenizer.json and meta.json, which
has the size and the sha256 of each file and of its own values. They detect damage, not forgery.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tril.data.sources.base import HASH_LIMIT, Split
from tril.data.tokenizer import for_documents, load_tokenizer

TOKENS, TOKENIZER, META = "tokens.bin", "tokenizer.json", "meta.json"
DECODED_TOKENS = 1 << 16  # tokens decoded at a time


def write_meta(folder: Path, meta: dict[str, Any]) -> None:
    """Writes meta.json, the last file of the folder."""
    content = json.dumps({**meta, "sha256": sha256_of(meta)}, indent=2) + "\n"
    (folder / META).write_text(content, encoding="utf-8")


def read_meta(folder: Path, fingerprint: str) -> dict[str, Any]:
    """The content of meta.json, after all files of the folder are verified: those above HASH_LIMIT by their size.

    Raises:
        ValueError: the folder is damaged or incomplete; the message names the file.
        OSError: a file is missing.
    """
    try:
        meta = json.loads((folder / META).read_bytes())
        is_whole = meta.pop("sha256") == sha256_of(meta) and meta["fingerprint"] == fingerprint
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{META} cannot be read") from error
    if not is_whole:
        raise ValueError(f"{META} does not match its checksum")
    for name, (size, sha256) in meta["files"].items():
        if (found := (folder / name).stat().st_size) != size:
            raise ValueError(f"{name} has {found} bytes instead of {size}")
        if size <= HASH_LIMIT and sha256_of_file(folder / name) != sha256:
            raise ValueError(f"{name} does not match its checksum")
    return meta


def on_one_level(meta: dict[str, Any]) -> dict[str, Any]:
    """The values of meta.json without its level "sources", which held several texts in earlier versions."""
    return {key: value for key, value in meta.items() if key != "sources"} | meta["sources"][""]


def sha256_of(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class PreparedText:
    """The text of a folder.

    Attributes:
        meta: the values of meta.json, see `on_one_level`.
    """

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> "PreparedText":
        """Raises ValueError or OSError for a folder that is damaged or incomplete."""
        meta = on_one_level(read_meta(folder, fingerprint))
        content = (folder / TOKENIZER).read_text(encoding="utf-8")
        return cls(folder, meta, for_documents(load_tokenizer(content)))

    def tokens(self, split: Split) -> np.ndarray:
        """Token ids of one part, (number of tokens,), memory-mapped and read-only, in the dtype of the file."""
        tokens = np.memmap(self.folder / TOKENS, self.meta["dtype"], mode="r")
        n_train = self.meta["counts"]["train"]["tokens"]
        return tokens[:n_train] if split == "train" else tokens[n_train:]

    def documents(self, split: Split) -> np.ndarray:
        """The document of each token of one part, counted from 0: (number of tokens,) int64.

        The end-of-text token belongs to the document that it starts.
        """
        return np.cumsum(self.tokens(split) == self.meta["eot_id"])

    def val_bytes(self, n_targets: int) -> int:
        """UTF-8 bytes of the first `n_targets` targets of the validation part, which are all tokens but the first.

        All of them have the bytes of the text after its first token. Of fewer, as with trainer.limit_val_batches, the
        bytes of the decoded tokens are counted, without end-of-text: bytes per token differ between documents.
        """
        counts = self.meta["counts"]["val"]
        if n_targets >= counts["targets"]:
            return max(counts["bytes"] - counts["first_bytes"], 1)
        tokens, size = self.tokens("val")[1:], 0
        for start in range(0, n_targets, DECODED_TOKENS):
            ids = tokens[start : min(start + DECODED_TOKENS, n_targets)]
            ids = ids[ids != self.meta["eot_id"]]
            size += len(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode())
        return max(size, 1)
