"""A text -> a memory-mapped file of token ids, see `data.prepared`.

The name of a prepared folder contains a fingerprint of source, split, tokenizer and budgets, so a changed setting
never reads stale tokens; a damaged folder is prepared again.
"""

import ctypes
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.data.cache import read_or_write, resolve_cache_dir
from tril.data.prepared import TOKENIZER, TOKENS, PreparedText, on_one_level, sha256_of, sha256_of_file, write_meta
from tril.data.sources.base import Piece, Source, Split
from tril.data.split import measure_overlap
from tril.data.tokenizer import TokenizerConfig, build, n_ids

FORMAT = 3  # incremented when the same settings produce other files, such as by another split
MAX_UINT16_VOCAB = 1 << 16
BATCH_SIZE = 1 << 20  # characters encoded at a time, by all cores; up to 150 MB as Encoding objects
MAX_OVERLAP = 0.01  # of the validation tokens; above that, the loss is too low
SHOWN_OVERLAP = 0.00005  # less is 0.00 %


@dataclass
class Counts:
    """The size of one part.

    Attributes:
        targets: tokens that are predicted: all but the first.
        first_bytes: of `bytes`, those of the first token, which is not predicted.
        unknown: tokens for characters that the tokenizer does not have.
    """

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    bytes: int = 0
    first_bytes: int = 0
    unknown: int = 0


def prepare(
    source: Source,
    config: TokenizerConfig,
    budgets: Mapping[Split, int | None],
    cache_dir: str | Path | None = None,
    *,
    progress: bool = True,
) -> PreparedText:
    """Trains or loads the tokenizer of a text, and tokenizes it into a folder of the cache, or reuses the folder of an
    earlier call.

    The training part ends with the first piece that reaches its budget, so only a document longer than a piece is
    truncated; likewise the validation part.

    Args:
        budgets: tokens of the training and of the validation part to prepare; None: all.
        cache_dir: see `resolve_cache_dir`.

    Raises:
        ValueError: a part of the text is empty, or the text is invalid.
        OSError: text, tokenizer or cache folder cannot be read or written.
    """
    of_text: dict[str, Any] = {"source": source.fingerprint(), "budgets": budgets}
    settings = {"format": FORMAT, "tokenizer": config.fingerprint(), "sources": {"": of_text}}
    fingerprint = sha256_of(settings)

    def write(folder: Path) -> None:
        folder.mkdir()
        tokenizer = build(config, training_texts(source, budgets["train"], config))
        vocab_size, names = n_ids(tokenizer), (TOKENIZER, TOKENS)
        dtype = np.dtype(np.uint16 if vocab_size <= MAX_UINT16_VOCAB else np.uint32)
        encoder = Encoder(tokenizer, config.eot, dtype)
        (folder / TOKENIZER).write_bytes(tokenizer.to_str(pretty=True).encode())  # `tokenizer.save` raises Exception
        with (folder / TOKENS).open("wb") as file:
            parts = {
                split: write_part(source, split, budget, encoder, file, progress) for split, budget in budgets.items()
            }
        of_text["counts"] = {split: asdict(counts) for split, counts in parts.items()}
        meta = {**settings, "fingerprint": fingerprint, "kind": source.name, "dtype": dtype.name}
        meta |= {"vocab_size": vocab_size, "eot_id": encoder.eot_id}
        meta |= {"files": {name: [(folder / name).stat().st_size, sha256_of_file(folder / name)] for name in names}}
        text = PreparedText(folder, on_one_level(meta), tokenizer)
        train, val = (text.tokens(split) for split in ("train", "val"))
        sizes = {split: counts.bytes for split, counts in parts.items()}
        of_text["overlap"] = measure_overlap(train, val, vocab_size, sizes["val"] / len(val))
        of_text["split"] = {"rule": source.split_rule, "val_share": sizes["val"] / sum(sizes.values())}
        write_meta(folder, meta)

    folder = resolve_cache_dir(cache_dir) / f"{source.name}-{fingerprint[:16]}"
    read = partial(PreparedText.read, fingerprint=fingerprint)
    prepared, is_new = read_or_write(folder, "prepares", write, read)
    if is_new:
        return_freed_memory()
        if progress:
            print(describe_split(prepared), file=sys.stderr)
    return prepared


def return_freed_memory() -> None:
    """Makes glibc return what the preparation has freed, about 100 MB, to the kernel. Other C libraries do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def training_texts(source: Source, budget: int | None, config: TokenizerConfig) -> Iterator[str]:
    """The text to train a tokenizer on."""
    n_characters = 0
    for piece in source.pieces("train"):
        yield piece.text
        n_characters += len(piece.text)
        if config.kind == "char" and budget is not None and n_characters >= budget:
            return  # a character is a token: later ones are not encoded


def write_part(
    source: Source, split: Split, budget: int | None, encoder: "Encoder", file: BinaryIO, progress: bool
) -> Counts:
    """Writes the ids of the pieces until these end or the budget is reached. Terminals show a progress bar."""
    counts, starts_document = Counts(), True
    shown = {
        "unit": "token" if budget else "B",
        "unit_scale": True,
        "delay": 0.1,
        "disable": None if progress else True,
    }
    with tqdm(desc=f"encoding the {split} part", total=budget, **shown) as bar:
        for piece, ids in encoder.encode(source.pieces(split)):
            file.write(ids.tobytes())
            n_bytes = len(piece.text.encode())
            if counts.tokens == 0:
                counts.first_bytes = first_token_bytes(encoder.tokenizer, piece.text)
            counts.unknown += int((ids == encoder.unknown_id).sum())
            counts.documents += starts_document
            counts.bytes += n_bytes
            counts.tokens += len(ids)
            starts_document = piece.ends_document
            bar.update(len(ids) if budget else n_bytes)
            if budget is not None and counts.tokens >= budget:
                break
    if counts.tokens == 0:
        remedy = "give more text, or change data.val_fraction, data.val_path or data.val_split"
        raise ValueError(f"data: the {split} part of {source.name} is empty; {remedy}")
    counts.targets = counts.tokens - 1
    if counts.unknown:
        message = "%d of %d tokens of the %s part are unknown to the tokenizer"
        logging.getLogger(__name__).warning(message, counts.unknown, counts.tokens, split)
    return counts


class Encoder:
    """Encodes pieces, with the id of `eot` after each document."""

    def __init__(self, tokenizer: Tokenizer, eot: str, dtype: np.dtype) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise a later fork prints a warning
        self.tokenizer, self.dtype = tokenizer, dtype
        self.eot_id = tokenizer.token_to_id(eot)
        self.unknown_id = tokenizer.token_to_id(
            getattr(tokenizer.model, "unk_token", None) or ""
        )  # None: no such token

    def encode(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, np.ndarray]]:
        """Every piece in order with its ids, (n,)."""
        for batch in batches_of(pieces):
            encodings = self.tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                yield piece, np.array([*encoding.ids, *[self.eot_id] * piece.ends_document], self.dtype)


def batches_of(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces until a group has BATCH_SIZE characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    yield batch


def first_token_bytes(tokenizer: Tokenizer, text: str) -> int:
    """UTF-8 bytes of the first token of a text."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if '"type":"ByteLevel"' in tokenizer.to_str():  # each character of a token is a byte, perhaps within a character
        return len(encoding.tokens[0])
    return len(text[: encoding.offsets[1][0] if len(encoding.ids) > 1 else len(text)].encode())


def describe_split(text: PreparedText) -> str:
    """One line about the validation part, and how much of it occurs in the training part."""
    split, overlap = text.meta["split"], text.meta["overlap"]["share"]
    line = f"validation is {split['val_share']:.1%} of the text ({split['rule']})"
    if overlap >= SHOWN_OVERLAP:
        line += f"; {100 * overlap:.2f} % of its tokens lie in passages that also occur in the training part"
    if overlap > MAX_OVERLAP:
        line += ", so the loss on them is too low; remove repeated text, or give separate text with data.val_path"
    return line
