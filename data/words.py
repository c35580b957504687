r"""Byte-level BPE of many texts at once: encodes each distinct word once, however often it occurs.

GPT-2's pattern splits text into words before any bytes are merged, so the ids of a text are those of its words.
Applying the pattern takes longer than the merging. This module cuts a text only where two or three ASCII bytes prove
that the pattern splits there. Elsewhere, such as next to non-ASCII characters, it makes no cut and the tokenizer gets a
longer text. The pattern (Radford et al. 2019, as in the released GPT-2):

    's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+

Letters: N bytes, W words, of which D are distinct.
"""

import json

import numpy as np
from tokenizers import Tokenizer

SEPARATOR = 0xFF  # after each text; no byte of UTF-8
MAX_CACHED_BYTES = 64  # longer words rarely occur again
MAX_CACHED_WORDS = 1 << 18  # about 60 MB

LETTER, DIGIT, OTHER, APOSTROPHE, BLANK, UNSURE = range(6)  # kinds of bytes
VISIBLE = [LETTER, DIGIT, OTHER, APOSTROPHE]


def _kind(byte: int) -> int:
    character = chr(byte)
    if byte >= 128:
        return UNSURE
    if character in " \t\n\v\f\r":
        return BLANK
    return LETTER if character.isalpha() else DIGIT if character.isdigit() else APOSTROPHE if byte == 39 else OTHER


KINDS = np.array([_kind(byte) for byte in range(256)], dtype=np.uint8)
SPLITS = np.zeros((6, 6), dtype=bool)  # [before, after]: whether the pattern splits between them in any context
SPLITS[VISIBLE, BLANK] = True
SPLITS[LETTER, [DIGIT, OTHER, APOSTROPHE]] = True
SPLITS[DIGIT, [LETTER, OTHER, APOSTROPHE]] = True
SPLITS[OTHER, [LETTER, DIGIT]] = True  # not after an apostrophe, which may begin 's


def splits_like_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether the ids depend on the words alone, and GPT-2's pattern splits the unchanged text into them."""
    state = json.loads(tokenizer.to_str())
    pattern = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    pre_tokenizer = state["pre_tokenizer"] or {}
    is_plain = state["normalizer"] is None and state["model"]["type"] == "BPE" and not state["model"]["dropout"]
    ignores_special = tokenizer.encode_special_tokens and all(token["special"] for token in state["added_tokens"])
    return is_plain and ignores_special and pattern.items() <= pre_tokenizer.items()


class WordEncoder:
    """Encodes texts as `tokenizer.encode(text, add_special_tokens=False)` does; needs `splits_like_gpt2(tokenizer)`.

    Several threads may call it at once; most of the work is done without Python's global lock.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.cache: dict[bytes, list[int]] = {}

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 (number of tokens,)."""
        import pyarrow

        joined = np.frombuffer(b"".join(text.encode() + bytes([SEPARATOR]) for text in texts), np.uint8)  # (N,)
        starts = word_starts(joined)  # (W,)
        offsets = np.append(starts, len(joined)).astype(np.int32)
        buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(joined)]
        words = pyarrow.BinaryArray.from_buffers(pyarrow.binary(), len(starts), buffers).dictionary_encode()
        distinct = pyarrow.array(self._encode(words.dictionary.to_pylist()), pyarrow.list_(pyarrow.uint32()))  # (D,)
        ids = distinct.take(words.indices)  # (W,) lists
        first_words = np.searchsorted(starts, _text_starts(joined))
        return np.split(ids.flatten().to_numpy(), ids.offsets.to_numpy()[first_words])[: len(texts)]

    def _encode(self, words: list[bytes]) -> list[list[int]]:
        """The ids of each word, without the separator."""
        cache = self.cache
        if len(cache) > MAX_CACHED_WORDS:
            cache = self.cache = {}
        new = [word for word in words if word not in cache]
        texts = [word.rstrip(bytes([SEPARATOR])).decode() for word in new]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ids = {word: encoding.ids for word, encoding in zip(new, encodings, strict=True)}
        cache |= {word: ids[word] for word in new if len(word) <= MAX_CACHED_BYTES}
        return [ids[word] if word in ids else cache[word] for word in words]


def word_starts(joined: np.ndarray) -> np.ndarray:
    """Positions (W,) in `joined`, uint8 (N,), where a word certainly begins, sorted."""
    kind = KINDS[joined]
    starts = np.zeros(len(joined), dtype=bool)
    starts[:1] = True
    starts[1:] = SPLITS[kind[:-1], kind[1:]]
    # The last of several blanks before a visible character is a word, or begins that character's word if it is a space.
    # A line break after a non-ASCII blank may belong to the same word: no cut after the break without one before it.
    blank, line_break, visible = kind == BLANK, (kind == BLANK) & (joined != ord(" ")), kind <= APOSTROPHE
    starts[1:-1] |= blank[:-2] & blank[1:-1] & visible[2:]
    starts[2:] |= (kind[:-2] != UNSURE) & line_break[1:-1] & visible[2:]
    starts[_text_starts(joined)] = True
    return np.flatnonzero(starts)


def _text_starts(joined: np.ndarray) -> np.ndarray:
    """Where each text but the first begins."""
    return np.flatnonzero(joined[:-1] == SEPARATOR) + 1
