"""A prepared text: its tokens, their documents and targets, and the bytes of its validation part; and several of them.

A prepared folder holds tokens.bin (the training part, then the validation part), tokenizer.json and meta.json, and of a
chat flags.bin, which tells the tokens that are trained on. meta.json has the size and the sha256 of each file and of
its own values. They detect damage, not forgery.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tril.data.encoding import OPENS, TARGET
from tril.data.sources.base import HASH_LIMIT, Split
from tril.data.tokenizer import for_documents, load_tokenizer

TOKENS, FLAGS, TOKENIZER, META = "tokens.bin", "flags.bin", "tokenizer.json", "meta.json"
DECODED_TOKENS = 1 << 16  # tokens decoded at a time


def write_meta(folder: Path, meta: dict[str, Any], sha256: Mapping[str, str]) -> None:
    """Writes meta.json, the last file of the folder.

    Args:
        sha256: of each file, computed in memory, so that it does not cover up what the disk did to them.
    """
    files = {}
    for name, digest in sha256.items():
        status = (folder / name).stat()
        files[name] = {"bytes": status.st_size, "sha256": digest, "mtime_ns": status.st_mtime_ns}
    meta = {**meta, "files": files}
    content = json.dumps({**meta, "sha256": sha256_of(meta)}, indent=2) + "\n"
    (folder / META).write_text(content, encoding="utf-8")


def read_meta(folder: Path, fingerprint: str) -> dict[str, Any]:
    """The content of meta.json, after all files of the folder are verified.

    A file above HASH_LIMIT is read only if it was changed after it was written, to keep later starts fast.

    Raises:
        ValueError: the folder is damaged or incomplete; the message names the file.
    """
    try:
        meta = json.loads((folder / META).read_bytes())
        if meta.pop("sha256") != sha256_of(meta) or meta["fingerprint"] != fingerprint:
            raise ValueError(f"{META} does not match its checksum")
        for name, expected in meta["files"].items():
            status, sha256 = (folder / name).stat(), expected["sha256"]
            if status.st_size != expected["bytes"]:
                raise ValueError(f"{name} has {status.st_size} bytes instead of {expected['bytes']}")
            if status.st_size > HASH_LIMIT and status.st_mtime_ns == expected["mtime_ns"]:
                continue
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    raise ValueError(f"{name} does not match its checksum")
        return meta
    except OSError as error:
        raise ValueError(f"{Path(error.filename or folder).name}: {error.strerror}") from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{META} cannot be read") from error


def sha256_of(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class PreparedText:
    """A prepared text: its folder, the content of meta.json, and its tokenizer."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> "PreparedText":
        """
        Raises:
            ValueError: the folder is damaged or incomplete.
        """
        meta = read_meta(folder, fingerprint)
        content = (folder / TOKENIZER).read_text(encoding="utf-8")
        return cls(folder, meta, for_documents(load_tokenizer(content)))

    def tokens(self, split: Split) -> np.ndarray:
        """Token ids of one part, (number of tokens,), memory-mapped and read-only, in the dtype of the file."""
        return self._part(TOKENS, self.meta["dtype"], split)

    def targets(self, split: Split) -> np.ndarray | None:
        """Which tokens of one part of a chat are trained on, bool (number of tokens,); None: all."""
        return self._part(FLAGS, "uint8", split) & TARGET > 0 if "targets" in self.meta else None

    def predicted(self, split: Split) -> np.ndarray:
        """The tokens of one part that are trained on, (M,)."""
        targets = self.targets(split)
        return self.tokens(split) if targets is None else self.tokens(split)[targets]

    def documents(self, split: Split) -> np.ndarray:
        """The document of each token of one part, counted from 0: (number of tokens,) int64.

        The end-of-text token belongs to the document that it starts. Of a chat, a conversation is a document.
        """
        if "targets" in self.meta:
            return np.cumsum(self._part(FLAGS, "uint8", split) & OPENS > 0) - 1
        return np.cumsum(self.tokens(split) == self.meta["eot_id"])

    def val_bytes(self, n_targets: int) -> int:
        """UTF-8 bytes of the first `n_targets` predicted tokens of the validation part.

        All of them have the bytes of the text after its first token. Of fewer, as with trainer.limit_val_batches, the
        bytes of the decoded tokens are counted, without end-of-text: bytes per token differ between documents.
        """
        if n_targets >= n_predicted(self.meta, "val"):
            return max(predicted_bytes(self.meta, "val"), 1)
        first = 0 if "targets" in self.meta else 1  # of a document, the first token is not predicted
        tokens, size = self.predicted("val")[first:], 0
        for start in range(0, n_targets, DECODED_TOKENS):
            ids = tokens[start : min(start + DECODED_TOKENS, n_targets)]
            ids = ids[ids != self.meta["eot_id"]]
            size += len(self.tokenizer.decode(ids.tolist(), skip_special_tokens=False).encode())
        return max(size, 1)

    def _part(self, name: str, dtype: str, split: Split) -> np.ndarray:
        both, middle = np.memmap(self.folder / name, dtype, mode="r"), self.meta["counts"]["train"]["tokens"]
        return both[:middle] if split == "train" else both[middle:]


class PreparedTexts:
    """The texts of a run by name; a single one has the name "".

    Attributes:
        counts: windows of each text in a block of training windows, see `data.batches`.
        meta: of a single text the content of meta.json. Of several it is like that: "fingerprint" of all texts with
            their tokenizer, but not of the shares; "counts" are sums; "sources" has the share and the values of each.
    """

    def __init__(self, texts: dict[str, PreparedText], counts: Collection[int], tokenizer: dict[str, Any]) -> None:
        self.texts, self.counts = texts, [*counts]
        first = next(iter(texts.values()))
        self.tokenizer: Tokenizer = first.tokenizer
        self.meta: dict[str, Any] = first.meta if len(texts) == 1 else self._common(tokenizer)

    def _common(self, tokenizer: dict[str, Any]) -> dict[str, Any]:
        metas = {name: text.meta for name, text in self.texts.items()}
        first, shares = next(iter(metas.values())), [count / sum(self.counts) for count in self.counts]
        kept = ("fingerprint", "source", "counts", "split", "overlap")
        counts = {
            split: {key: sum(meta["counts"][split][key] for meta in metas.values()) for key in first["counts"][split]}
            for split in ("train", "val")
        }
        sources = {
            name: {"share": share} | {key: meta[key] for key in kept}
            for (name, meta), share in zip(metas.items(), shares, strict=True)
        }
        return {
            "fingerprint": sha256_of([meta["fingerprint"] for meta in metas.values()]),
            "source": {"kind": "mixture", "sources": {name: meta["source"] for name, meta in metas.items()}},
            "tokenizer": tokenizer,
            "counts": counts,
            "sources": sources,
        } | {key: first[key] for key in ("dtype", "vocab_size", "eot_id", "libraries")}


def n_predicted(meta: dict[str, Any], split: Split) -> int:
    """Targets of one part: all tokens but the first of each text of a mixture, of a chat those of the answers."""
    n_texts = len(meta.get("sources", ())) or 1
    return meta["targets"][split] if "targets" in meta else meta["counts"][split]["tokens"] - n_texts


def predicted_bytes(meta: dict[str, Any], split: Split) -> int:
    """UTF-8 bytes of the targets of one part."""
    return meta["counts"][split]["bytes"] - meta["counts"][split]["first_bytes"]


def val_bytes_per_token(meta: dict[str, Any]) -> float:
    """UTF-8 bytes of the validation part per predicted token, which converts nats per token into bits per byte."""
    return predicted_bytes(meta, "val") / n_predicted(meta, "val")
