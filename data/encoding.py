"""Pieces of text -> token ids, in several threads."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tokenizers import Tokenizer

from tril.data.sources.base import Piece
from tril.data.tokenizer_json import guarded
from tril.data.words import WordEncoder, splits_like_gpt2

BATCH_SIZE = 1 << 19  # characters that a thread encodes at a time; up to 75 MB as Encoding objects
MAX_THREADS = 8  # more contend for Python's global lock and take more memory


def encoded_pieces(
    pieces: Iterable[Piece], tokenizer: Tokenizer, eot: np.ndarray
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Every piece with its ids, in order, and `eot` (1,) after each document. Threads encode the next batches."""

    def encode_texts(texts: list[str]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_batch(batch: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        texts = zip(batch, guarded(encode, [piece.text for piece in batch]), strict=True)
        return [(piece, np.append(ids, eot[: piece.ends_document]).astype(eot.dtype)) for piece, ids in texts]

    encode = WordEncoder(tokenizer) if splits_like_gpt2(tokenizer) else encode_texts
    threads = min(os.cpu_count() or 1, MAX_THREADS)
    pending: deque = deque()
    with ThreadPoolExecutor(threads) as pool:
        for batch in _batches(pieces):
            pending.append(pool.submit(encode_batch, batch))
            if len(pending) > threads:
                yield from pending.popleft().result()
        for encoded in pending:
            yield from encoded.result()


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
