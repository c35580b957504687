"""Pieces of text -> token ids."""

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from tril.data.sources.base import Piece
from tril.data.tokenizer import for_documents, guarded

BATCH_SIZE = 1 << 20  # characters encoded at a time, by all cores; up to 150 MB as Encoding objects
TARGET, OPENS = 1, 2  # flags of a token of a chat: it is trained on; it is the first of its conversation


class Encoded(NamedTuple):
    """A piece with its ids, uint32 (n,), and `n_bytes`, those of its UTF-8 text; of a conversation, of its answers.

    `flags` are TARGET and OPENS of each token, uint8 (n,); None: a document, all of whose tokens are targets.
    """

    piece: Piece
    ids: np.ndarray
    n_bytes: int
    flags: np.ndarray | None = None


class Encoder:
    """Encodes pieces, with the id of `eot` after each document.

    Each turn of a conversation is encoded alone, as in generation, where the prompt is encoded without its answer. Its
    special tokens are those of the template: `Piece.turns` refuses messages that contain one.
    """

    def __init__(self, tokenizer: Tokenizer, eot: str) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # otherwise a later fork prints a warning
        self.tokenizer, self.eot, self.eot_id = tokenizer, eot, tokenizer.token_to_id(eot)
        self.of_turns = for_documents(Tokenizer.from_str(tokenizer.to_str()))
        self.of_turns.encode_special_tokens = False
        added = self.of_turns.get_added_tokens_decoder().values()
        self.special = {token.content for token in added if token.special} | {eot}

    def encode(self, pieces: Iterable[Piece]) -> Iterator[Encoded]:
        """Every piece in order."""
        for batch in _batches(pieces):
            encodings = iter(_encode(self.tokenizer, [piece.text for piece in batch if piece.turns is None]))
            for piece in batch:
                yield self._turns(piece) if piece.turns else self._document(piece, next(encodings))

    def _document(self, piece: Piece, encoding: Encoding) -> Encoded:
        ids = np.array([*encoding.ids, *[self.eot_id] * piece.ends_document], np.uint32)
        return Encoded(piece, ids, len(piece.text.encode()))

    def _turns(self, piece: Piece) -> Encoded:
        assert piece.turns is not None and piece.ends_document
        turns = piece.turns(self.eot, self.special)
        encodings = _encode(self.of_turns, [turn.text for turn in turns])
        sizes = [len(encoding.ids) for encoding in encodings]
        flags = np.repeat(np.array([TARGET if turn.is_target else 0 for turn in turns], np.uint8), sizes)
        flags[:1] |= OPENS
        answers = "".join(turn.text for turn in turns if turn.is_target)
        for token in self.special:
            answers = answers.replace(token, "")
        ids = np.array([token for encoding in encodings for token in encoding.ids], np.uint32)
        return Encoded(piece, ids, len(answers.encode()), flags)


def first_token_bytes(tokenizer: Tokenizer, text: str) -> int:
    """UTF-8 bytes of the first token of a text."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if '"type":"ByteLevel"' in tokenizer.to_str():  # each character of a token is a byte, perhaps within a character
        return len(encoding.tokens[0])
    return len(text[: encoding.offsets[1][0] if len(encoding.ids) > 1 else len(text)].encode())


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    return guarded("cannot encode the text", tokenizer.encode_batch_fast, texts, add_special_tokens=False)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Groups pieces until a group has BATCH_SIZE characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_SIZE:
            yield batch
            batch, size = [], 0
    yield batch
