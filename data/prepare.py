"""Documents -> one file of token ids that is memory-mapped afterwards.

A prepared folder holds tokens.bin (the training part, then the validation part), tokenizer.json and meta.json. Its name carries a
fingerprint of source, split, tokenizer and budgets: a changed setting finds another folder, never a stale one.
"""

import hashlib
import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from tril.data.cache import default_cache_dir, write_folder
from tril.data.sources.base import Piece, Source, Split
from tril.data.tokenizer import TokenizerConfig, build, load, n_ids
from tril.data.words import WordEncoder, splits_like_gpt2

FORMAT = 1  # raised whenever the same settings would give other files
BATCH_SIZE = (
    1 << 19
)  # characters encoded at a time by each thread: up to 75 MB while they are tokens in the tokenizer's form
MOST_THREADS = 8  # more would hold up each other and take more memory
LARGEST_UINT16 = 1 << 16
QUIET_INTERVAL = 60  # seconds between lines where the progress bar is not seen live, such as in a log file
UNKNOWN_EXAMPLES = 10
SPLITS: tuple[Split, ...] = ("train", "val")
log = logging.getLogger(__name__)


@dataclass
class Counts:
    """What one part amounts to; `unknown` counts tokens that stand for a character the tokenizer does not have."""

    documents: int = 0
    bytes: int = 0
    characters: int = 0
    tokens: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class PreparedText:
    """A prepared corpus: its folder, the content of meta.json, and its tokenizer."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    def tokens(self, split: Split) -> np.ndarray:
        """Token ids of one part, memory-mapped and read-only, (number of tokens,) in the dtype of the file."""
        every = np.memmap(self.folder / "tokens.bin", dtype=self.meta["dtype"], mode="r")
        middle = self.meta["counts"]["train"]["tokens"]
        return every[:middle] if split == "train" else every[middle:]


def prepare(
    source: Source,
    tokenizer_config: TokenizerConfig,
    cache_dir: str | Path | None = None,
    *,
    token_budget: int | None = None,
    val_token_budget: int | None = None,
    progress: bool = True,
) -> PreparedText:
    """Tokenizes `source` into the cache folder (None: `default_cache_dir()`), or finds it there from an earlier time.

    A budget ends its part with the first piece that reaches it: only a document longer than a piece can be torn.

    Raises:
        ValueError: a part of the source is empty, or its text cannot be read as what it should be.
        OSError: text, tokenizer or cache folder cannot be read or written.
    """
    budgets = {"train": token_budget, "val": val_token_budget}
    settings = {
        "format": FORMAT,
        "source": source.fingerprint(),
        "tokenizer": tokenizer_config.identity(),
        "budgets": budgets,
    }
    fingerprint = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    folder = (Path(cache_dir).expanduser() if cache_dir else default_cache_dir()) / f"{source.name}-{fingerprint[:16]}"

    def fill(part: Path) -> None:
        tokenizer = build(tokenizer_config, _training_texts(source, tokenizer_config, token_budget, progress))
        # not tokenizer.save, which raises a bare Exception where the disk is full
        (part / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        sizes = _write_tokens(source, tokenizer, tokenizer_config, budgets, part / "tokens.bin", progress)
        libraries = {"tokenizers": tokenizers.__version__}
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        meta = {**settings, "fingerprint": fingerprint, **sizes, "libraries": libraries, "created": created}
        (part / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")

    if not _is_complete(folder, fingerprint):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # said aloud, a later fork does not warn about it
        write_folder(folder, fill, lambda place: _is_complete(place, fingerprint))
    tokenizer = load((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return PreparedText(folder, _read_meta(folder), tokenizer)


def val_bytes_per_token(meta: dict[str, Any]) -> float:
    """UTF-8 bytes of the validation part per predicted token, which turns nats per token into bits per byte."""
    counts = meta["counts"]["val"]
    return counts["bytes"] / (counts["tokens"] - 1)  # the first token is not predicted


def _read_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text(encoding="utf-8"))


def _is_complete(folder: Path, fingerprint: str) -> bool:
    """Whether the folder is what it says: the right fingerprint, and as many tokens as were counted."""
    try:
        meta = _read_meta(folder)
        n_tokens = sum(meta["counts"][split]["tokens"] for split in SPLITS)
        size = (folder / "tokens.bin").stat().st_size
        complete = meta["fingerprint"] == fingerprint and size == n_tokens * np.dtype(meta["dtype"]).itemsize
        return complete and (folder / "tokenizer.json").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _training_texts(source: Source, config: TokenizerConfig, token_budget: int | None, progress: bool) -> Iterator[str]:
    """What a tokenizer is trained on; its progress bar counts bytes."""
    read = 0
    with _progress_bar("reading text for the tokenizer", "B", None, progress) as bar:
        for piece in source.pieces("train"):
            bar.update(len(piece.text.encode()))
            yield piece.text
            read += len(piece.text)
            if config.kind == "char" and token_budget is not None and read >= token_budget:
                return  # a character is a token: no other character will be met


def _write_tokens(
    source: Source,
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    budgets: dict[str, int | None],
    path: Path,
    progress: bool,
) -> dict[str, Any]:
    """Writes both parts to `path`; returns what meta.json says about them."""
    vocab_size = n_ids(tokenizer)
    dtype = "uint16" if vocab_size <= LARGEST_UINT16 else "uint32"
    eot_id = tokenizer.token_to_id(config.eot)
    counts = {}
    with open(path, "wb") as file:
        for split in SPLITS:
            total, unit = (budgets[split], "token") if budgets[split] else (None, "B")
            with _progress_bar(f"encoding the {split} part", unit, total, progress) as bar:
                part = _write_part(source.pieces(split), tokenizer, eot_id, dtype, file, budgets[split], bar)
            if part.tokens == 0:
                remedy = "give more text, or change data.val_fraction, data.val_path or data.val_split"
                raise ValueError(f"data: the {split} part of {source.name} is empty; {remedy}")
            counts[split] = asdict(part)
    return {"dtype": dtype, "vocab_size": vocab_size, "eot_id": eot_id, "counts": counts}


def _write_part(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    eot_id: int,
    dtype: str,
    file: BinaryIO,
    budget: int | None,
    bar: tqdm,
) -> Counts:
    """Writes the ids of `pieces`, with `eot_id` after each document, until they end or `budget` tokens are reached."""
    unknown_token = getattr(tokenizer.model, "unk_token", None)
    unknown_id = tokenizer.token_to_id(unknown_token) if unknown_token else None
    counts, unknown, between_documents = Counts(), set(), True
    for piece, ids in _encoded(pieces, tokenizer):
        ids = (np.append(ids, eot_id) if piece.ends_document else ids).astype(dtype)
        file.write(ids.tobytes())
        n_unknown = 0 if unknown_id is None else int((ids == unknown_id).sum())
        if n_unknown:
            unknown |= {character for character in set(piece.text) if tokenizer.token_to_id(character) is None}
        size = len(piece.text.encode())
        counts.documents += between_documents
        counts.bytes += size
        counts.characters += len(piece.text)
        counts.tokens += len(ids)
        counts.unknown += n_unknown
        between_documents = piece.ends_document
        bar.update(len(ids) if budget else size)
        if budget is not None and counts.tokens >= budget:
            break
    _warn_unknown(counts, unknown)
    return counts


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Every piece with its ids, in order. Threads encode the next batches meanwhile, outside Python's lock."""
    encode = WordEncoder(tokenizer) if splits_like_gpt2(tokenizer) else partial(_encode, tokenizer)
    threads = min(os.cpu_count() or 1, MOST_THREADS)
    waiting: deque = deque()
    with ThreadPoolExecutor(threads) as pool:
        for batch in _batches(pieces):
            waiting.append((batch, pool.submit(encode, [piece.text for piece in batch])))
            if len(waiting) > threads:
                batch, encoded = waiting.popleft()
                yield from zip(batch, encoded.result(), strict=True)
        for batch, encoded in waiting:
            yield from zip(batch, encoded.result(), strict=True)


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _warn_unknown(counts: Counts, characters: set[str]) -> None:
    if counts.unknown:
        examples = " ".join(map(repr, sorted(characters)[:UNKNOWN_EXAMPLES]))
        log.warning("%d of %d tokens are unknown to the tokenizer, such as %s", counts.unknown, counts.tokens, examples)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces until a group has BATCH_SIZE characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _progress_bar(title: str, unit: str, total: int | None, shown: bool) -> tqdm:
    interval = 0.1 if sys.stderr.isatty() else QUIET_INTERVAL
    return tqdm(
        desc=title, unit=unit, unit_scale=True, total=total, disable=not shown, mininterval=interval, delay=interval
    )
