"""Pieces of text -> token ids, in several threads."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from tril.data.sources.base import Piece
from tril.data.tokenizer_json import guarded
from tril.data.words import WordEncoder, splits_like_gpt2

BATCH_SIZE = 1 << 19  # characters that a thread encodes at a time; up to 75 MB as Encoding objects
MAX_THREADS = 8  # more contend for Python's global lock and take more memory
TARGET, OPENS = 1, 2  # flags of a token of a chat: it is trained on; it is the first of its conversation


class Encoded(NamedTuple):
    """A piece with its ids, (n,), and `n_bytes`, those of its UTF-8 text; of a conversation, those of its answers.

    `flags` are TARGET and OPENS of each token, uint8 (n,); None: a document, all of whose tokens are targets.
    """

    piece: Piece
    ids: np.ndarray
    n_bytes: int
    flags: np.ndarray | None = None


def encoded_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer, eot: str, dtype: np.dtype) -> Iterator[Encoded]:
    """Every piece in order, with the id of `eot` after each document. Threads encode the next batches."""

    def encode_texts(texts: list[str]) -> list[np.ndarray]:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_batch(batch: list[Piece]) -> list[Encoded]:
        documents = [piece for piece in batch if piece.turns is None]
        texts = iter(guarded(encode, [piece.text for piece in documents]))
        return [encode_conversation(piece) if piece.turns else encode_document(piece, next(texts)) for piece in batch]

    def encode_document(piece: Piece, ids: np.ndarray) -> Encoded:
        ids = np.append(ids, eot_id[: piece.ends_document]).astype(dtype)
        return Encoded(piece, ids, len(piece.text.encode()))

    eot_id = np.array([tokenizer.token_to_id(eot)], dtype)
    encode_conversation = ConversationEncoder(tokenizer, eot, dtype)
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


class ConversationEncoder:
    """Encodes pieces with `turns`.

    Each turn is encoded alone, as in generation, where the prompt is encoded without its answer. Special tokens are
    those of the template: `Piece.turns` refuses messages that contain one.
    """

    def __init__(self, tokenizer: Tokenizer, eot: str, dtype: np.dtype) -> None:
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())  # reads special tokens, unlike `tokenizer`
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.eot, self.dtype = eot, dtype
        added = self.tokenizer.get_added_tokens_decoder().values()
        self.special = {token.content for token in added if token.special} | {eot}

    def __call__(self, piece: Piece) -> Encoded:
        assert piece.turns is not None and piece.ends_document
        turns = piece.turns(self.eot, self.special)
        texts = [turn.text for turn in turns]
        encodings = guarded(lambda: self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        ids = np.array([token for encoding in encodings for token in encoding.ids], self.dtype)
        sizes = [len(encoding.ids) for encoding in encodings]
        flags = np.repeat(np.array([TARGET if turn.is_target else 0 for turn in turns], np.uint8), sizes)
        flags[:1] |= OPENS
        return Encoded(piece, ids, sum(self._bytes(turn.text) for turn in turns if turn.is_target), flags)

    def _bytes(self, text: str) -> int:
        """UTF-8 bytes without special tokens."""
        for token in self.special:
            text = text.replace(token, "")
        return len(text.encode())


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
