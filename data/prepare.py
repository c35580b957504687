"""A text -> a folder of the cache, prepared once: its tokens and documents, and the bytes of its validation part.

The name of a folder contains a fingerprint of source, split, tokenizer and budgets, so a changed setting never reads
stale tokens. The folder holds tokens.bin (the training part, then the validation part), tokenizer.json and meta.json,
which has the size and the sha256 of each file and of its own values. They detect damage, not forgery; a damaged folder
is prepared again.
"""

import codecs
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.data.cache import PROGRESS, read_or_write, resolve_cache_dir, sha256_of_file
from tril.data.overlap import measure_overlap
from tril.data.sources.base import Source, Split
from tril.data.split import Plan, plan_split
from tril.data.tokenizer import TokenizerConfig, build, load_tokenizer, n_ids, unknown_id

FORMAT = 3  # incremented when the same settings produce other files, such as by another split
TOKENS, TOKENIZER, META = "tokens.bin", "tokenizer.json", "meta.json"
MAX_UINT16_VOCAB = 1 << 16
BATCH_SIZE = 1 << 20  # characters encoded at a time, by all cores; up to 150 MB as Encoding objects
PIECE_SIZE = 1 << 18  # bytes; large enough to encode efficiently, small enough to give every core some pieces
LONG_WORD = re.compile(r"(\S{1024}|\s{1024})")
MAX_OVERLAP = 0.01  # of the validation tokens; above that, the loss is too low
FEW_TARGETS = 1000


@dataclass(frozen=True)
class PreparedText:
    """The text of a folder.

    Attributes:
        meta: the values of meta.json, without the level "sources", which held several texts in earlier versions.
    """

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> "PreparedText":
        """Verifies all files of the folder, at about 1 GB per second.

        Raises:
            ValueError: the folder is damaged or incomplete; the message names the file.
            OSError: a file is missing.
        """
        meta = json.loads((folder / META).read_bytes())
        meta = meta if isinstance(meta, dict) else {}
        if meta.pop("sha256", None) != sha256_of(meta) or meta["fingerprint"] != fingerprint:
            raise ValueError(f"{META} does not match its checksum")
        for name in (TOKENIZER, TOKENS):
            if size_and_sha256(folder / name) != meta["files"][name]:
                raise ValueError(f"{name} does not match its checksum")
        of_text = meta.pop("sources")[""]
        tokenizer = load_tokenizer((folder / TOKENIZER).read_text(encoding="utf-8"))
        tokenizer.encode_special_tokens = True
        return cls(folder, meta | of_text, tokenizer)

    def tokens(self, split: Split) -> np.ndarray:
        """Token ids of one part, (number of tokens,), memory-mapped, in the dtype of the file."""
        tokens = np.memmap(self.folder / TOKENS, self.meta["dtype"], mode="c")  # torch warns of a read-only array
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
        ids = self.tokens("val")[1 : n_targets + 1]
        text = self.tokenizer.decode(ids[ids != self.meta["eot_id"]].tolist(), skip_special_tokens=False)
        return max(len(text.encode()), 1)


def prepare(source: Source, *, progress: bool = True) -> PreparedText:
    """Trains or loads the tokenizer of a text, and tokenizes it into a folder of the cache, or reuses the folder of an
    earlier call.

    The training part ends with the first piece that reaches its budget, so only a document longer than a piece is
    truncated; likewise the validation part.

    Args:
        progress: print how the text is split.

    Raises:
        ValueError: a part of the text is empty, or the text is invalid.
        OSError: text, tokenizer or cache folder cannot be read or written.
    """
    budgets = {"train": source.token_budget, "val": source.val_token_budget}
    of_text = {"source": source.fingerprint(), "budgets": budgets}
    settings = {"format": FORMAT, "tokenizer": source.tokenizer.fingerprint(), "sources": {"": of_text}}
    fingerprint = sha256_of(settings)
    folder = resolve_cache_dir(source.cache_dir) / f"{source.name}-{fingerprint[:16]}"
    write = partial(write_folder, source=source, meta=settings | {"fingerprint": fingerprint}, progress=progress)
    return read_or_write(folder, write, partial(PreparedText.read, fingerprint=fingerprint))


def write_folder(folder: Path, source: Source, meta: dict[str, Any], progress: bool) -> None:
    """Creates the folder of a text.

    Args:
        meta: the first values of meta.json. "sources" has a text without a name, with its "budgets".
    """
    folder.mkdir()
    config, plan = source.tokenizer, plan_split(source)
    of_text = meta["sources"][""]
    budgets: dict[Split, int | None] = of_text["budgets"]
    texts = training_texts(pieces_of(source, plan, "train"), budgets["train"], config)
    tokenizer = build(config, tqdm(texts, "training the tokenizer", unit=" pieces", **PROGRESS))
    (folder / TOKENIZER).write_bytes(tokenizer.to_str(pretty=True).encode())  # `tokenizer.save` raises Exception
    with (folder / TOKENS).open("wb") as file:
        counts = {
            split: write_part(file, tokenizer, config.eot, pieces_of(source, plan, split), budget, split)
            for split, budget in budgets.items()
        }
    if empty := [split for split in counts if not counts[split]["tokens"]]:
        cause = f"the {empty[0]} part of {source.name} is empty" + (f" ({source.note})" if source.note else "")
        raise ValueError(f"data: {cause}; give more text, or change data.val_fraction or data.val_path")
    vocab_size, dtype = n_ids(tokenizer), dtype_of(tokenizer)
    train, val = np.split(np.memmap(folder / TOKENS, dtype, mode="r"), [counts["train"]["tokens"]])
    sizes = {split: each["bytes"] for split, each in counts.items()}
    overlap = measure_overlap(train, val, vocab_size, sizes["val"] / len(val))
    split = {"rule": plan.rule, "val_share": sizes["val"] / sum(sizes.values())}
    of_text = of_text | {"counts": counts, "overlap": overlap, "split": split}
    meta = meta | {"sources": {"": of_text}, "kind": source.name, "dtype": dtype.name, "vocab_size": vocab_size}
    meta["eot_id"] = tokenizer.token_to_id(config.eot)
    meta["files"] = {name: size_and_sha256(folder / name) for name in (TOKENIZER, TOKENS)}
    meta["sha256"] = sha256_of(meta)
    (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    if progress:
        print(*filter(None, (source.note, describe_split(of_text))), sep="\n", file=sys.stderr)


class Piece(NamedTuple):
    """A document or a part of one, and whether its document ends with it."""

    text: str
    ends_document: bool


def pieces_of(source: Source, plan: Plan, split: Split) -> Iterator[Piece]:
    """The text of one part, always in the same order, in pieces of about PIECE_SIZE bytes.

    A piece has whole lines, except for longer lines.
    """
    for document in source.documents(split):
        data, start, decoder = plan.part(document, split).encode(), 0, codecs.getincrementaldecoder("utf-8")()
        while start < len(data):
            end = start + PIECE_SIZE
            end = data.find(b"\n", end, end + PIECE_SIZE) + 1 or end + PIECE_SIZE
            yield Piece(decoder.decode(data[start:end]), source.ends_documents and end >= len(data))
            start = end


def training_texts(pieces: Iterable[Piece], budget: int | None, config: TokenizerConfig) -> Iterator[str]:
    """The text to train a tokenizer on, with long words cut: training takes the square of their length."""
    n_characters = 0
    for piece in pieces:
        yield from filter(None, LONG_WORD.split(piece.text))
        n_characters += len(piece.text)
        if config.kind == "char" and budget is not None and n_characters >= budget:
            return  # a character is a token: later ones are not encoded


def write_part(
    file: BinaryIO, tokenizer: Tokenizer, eot: str, pieces: Iterable[Piece], budget: int | None, split: Split
) -> dict[str, int]:
    """Writes the ids of the pieces, with end-of-text after each document, until these end or the budget is reached.

    Returns:
        The number of "documents", "tokens", "targets" (tokens that are predicted: all but the first), "bytes",
        "first_bytes" (of these, those of the first token) and "unknown" tokens, for characters that the tokenizer does
        not have.
    """
    counts: dict[str, int] = dict.fromkeys(("documents", "tokens", "targets", "bytes", "first_bytes", "unknown"), 0)
    dtype, eot_id, unknown = dtype_of(tokenizer), tokenizer.token_to_id(eot), unknown_id(tokenizer)
    starts_document = True
    with tqdm(desc=f"encoding the {split} part", total=budget, unit="token", unit_scale=True, **PROGRESS) as bar:
        for piece, ids in encode(tokenizer, pieces):
            if counts["tokens"] == 0:
                counts["first_bytes"] = first_token_bytes(tokenizer, piece.text)
            counts["documents"] += starts_document
            starts_document = piece.ends_document
            ids += [eot_id] * piece.ends_document
            counts["unknown"] += ids.count(unknown)
            file.write(np.array(ids, dtype).tobytes())
            counts["bytes"] += len(piece.text.encode())
            counts["tokens"] += len(ids)
            bar.update(len(ids))
            if budget is not None and counts["tokens"] >= budget:
                break
    counts["targets"] = max(counts["tokens"] - 1, 0)
    return counts


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, list[int]]]:
    """Every piece in order with its ids; all cores encode a batch of about BATCH_SIZE characters."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise a later fork prints a warning
    batch, size = list[Piece](), 0
    for piece in chain(pieces, [None]):
        if piece is not None:
            batch.append(piece)
            size += len(piece.text)
        if piece is None or size >= BATCH_SIZE:
            encodings = tokenizer.encode_batch_fast([each.text for each in batch], add_special_tokens=False)
            yield from zip(batch, (encoding.ids for encoding in encodings), strict=True)
            batch, size = [], 0


def first_token_bytes(tokenizer: Tokenizer, text: str) -> int:
    """UTF-8 bytes of the first token of a text."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if '"type":"ByteLevel"' in tokenizer.to_str():  # each character of a token is a byte, perhaps within a character
        return len(encoding.tokens[0])
    return len(text[: encoding.offsets[1][0] if len(encoding.ids) > 1 else len(text)].encode())


def dtype_of(tokenizer: Tokenizer) -> np.dtype:
    """Of the ids in the file."""
    return np.dtype(np.uint16 if n_ids(tokenizer) <= MAX_UINT16_VOCAB else np.uint32)


def describe_split(meta: Mapping[str, Any]) -> str:
    """One line about the validation part, and how much of it occurs in the training part."""
    split, overlap, n_targets = meta["split"], meta["overlap"]["share"], meta["counts"]["val"]["targets"]
    n_unknown = sum(counts["unknown"] for counts in meta["counts"].values())
    line = f"validation is {split['val_share']:.1%} of the text: {split['rule']}"
    line += f"; {overlap:.2%} of its tokens lie in passages that also occur in the training part"
    if overlap > MAX_OVERLAP:
        line += ", so the loss on them is too low; remove repeated text, or give separate text with data.val_path"
    if n_targets < FEW_TARGETS:
        line += f"; a loss on its {n_targets} tokens says little, so give more text"
    if n_unknown:
        line += f"; {n_unknown} tokens of the text are unknown to the tokenizer"
    return line


def size_and_sha256(path: Path) -> list:
    return [path.stat().st_size, sha256_of_file(path)]


def sha256_of(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
