"""Byte-level BPE of many texts at once: each distinct word is encoded once, however often it occurs.

GPT-2's pattern splits text into words before any byte is merged, so the ids of a text are those of its words. Splitting with the
pattern itself takes longer than the merging. Here a text is cut where a look at two or three bytes of ASCII proves that the pattern
splits there too; where that is not certain, as beside other scripts, nothing is cut and the tokenizer sees more at a time. The pattern
(Radford et al. 2019, as in the released GPT-2):

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+
"""

import json
from functools import cache

import numpy as np
from tokenizers import Tokenizer

SEPARATOR = 0xFF  # between texts: never part of UTF-8
LONGEST_KEPT = 64  # bytes; longer words hardly occur again
MOST_KEPT = 1 << 18  # words: about 60 MB
LETTER, DIGIT, OTHER, APOSTROPHE, SPACE, BREAK, UNSURE = range(7)


def splits_like_gpt2(tokenizer: Tokenizer) -> bool:
    """Whether ids depend on the words alone, and those are found by GPT-2's pattern in the text as it is."""
    state = json.loads(tokenizer.to_str())
    pattern = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    found = state["pre_tokenizer"] or {}
    plain = state["normalizer"] is None and state["model"]["type"] == "BPE" and not state["model"]["dropout"]
    special = tokenizer.encode_special_tokens and all(token["special"] for token in state["added_tokens"])
    return plain and special and all(found.get(key) == value for key, value in pattern.items())


class WordEncoder:
    """Encodes texts as `tokenizer.encode(text, add_special_tokens=False)` does; `splits_like_gpt2(tokenizer)` must hold.

    May be called by several threads at once: the work is done outside Python's lock.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.known: dict[bytes, list[int]] = {}

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 (number of tokens,)."""
        import pyarrow

        contents = [text.encode() for text in texts]
        joined = np.frombuffer(
            bytes([SEPARATOR]).join([*contents, b""]), np.uint8
        )  # (N,) bytes, a separator behind each text
        ends = np.cumsum([len(content) + 1 for content in contents])
        starts = word_starts(joined)  # (W,)
        offsets = np.append(starts, len(joined)).astype(np.int32)
        buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(joined)]
        words = pyarrow.BinaryArray.from_buffers(pyarrow.binary(), len(starts), buffers).dictionary_encode()
        distinct = self._ids(words.dictionary.to_pylist())
        lengths = np.array([len(ids) for ids in distinct], dtype=np.int64)
        where = words.indices.to_numpy()  # (W,) which of the distinct words
        behind = np.cumsum(lengths[where])  # (W,) tokens up to the end of each word
        first = np.cumsum(lengths) - lengths  # where the ids of each distinct word begin in `flat`
        flat = np.array([token for ids in distinct for token in ids], dtype=np.uint32)
        shift = np.repeat(first[where] - behind + lengths[where], lengths[where])
        every = flat[shift + np.arange(len(shift))]
        return np.split(every, behind[np.searchsorted(starts, ends) - 1])[:-1]

    def _ids(self, words: list[bytes]) -> list[list[int]]:
        """The ids of each word; none for the separator."""
        found = [self.known.get(word) for word in words]
        unknown = [number for number, ids in enumerate(found) if ids is None]
        texts = [words[number].rstrip(bytes([SEPARATOR])).decode() for number in unknown]
        for number, encoding in zip(
            unknown, self.tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            found[number] = encoding.ids
        if len(self.known) > MOST_KEPT:
            self.known = {}
        self.known |= {words[number]: found[number] for number in unknown if len(words[number]) <= LONGEST_KEPT}
        return found


def word_starts(joined: np.ndarray) -> np.ndarray:
    """Where a word certainly begins in texts that are joined with SEPARATOR, uint8 (N,): positions (W,), sorted."""
    kinds, splits = _tables()
    kind = kinds[joined]
    starts = np.zeros(len(joined), dtype=bool)
    starts[:1] = True
    starts[1:] = splits[kind[:-1] * np.uint8(8) + kind[1:]]
    # Of several blanks before a visible character the last one is a word of its own, or begins that character's where it is a space.
    # A blank after another script's white space belongs to both: then there must be no end behind it without a start before it.
    blank, visible = (kind == SPACE) | (kind == BREAK), kind <= APOSTROPHE
    starts[1:-1] |= blank[:-2] & blank[1:-1] & visible[2:]
    starts[2:] |= (kind[:-2] != UNSURE) & (kind[1:-1] == BREAK) & visible[2:]
    separators = np.flatnonzero(joined[:-1] == SEPARATOR)
    starts[separators + 1] = True
    return np.flatnonzero(starts)


@cache
def _tables() -> tuple[np.ndarray, np.ndarray]:
    """The kind of each byte, (256,), and whether the pattern splits between two kinds whatever stands around, (64,)."""
    kinds = np.full(256, UNSURE, dtype=np.uint8)
    kinds[:128] = OTHER
    for kind, characters in [(SPACE, " "), (BREAK, "\t\n\v\f\r"), (APOSTROPHE, "'"), (DIGIT, "0123456789")]:
        kinds[[ord(character) for character in characters]] = kind
    kinds[[code for code in range(128) if chr(code).isalpha()]] = LETTER
    visible, blank = (LETTER, DIGIT, OTHER, APOSTROPHE), (SPACE, BREAK)
    pairs = [(before, after) for before in visible for after in blank]
    pairs += [
        (LETTER, DIGIT),
        (LETTER, OTHER),
        (LETTER, APOSTROPHE),
        (DIGIT, LETTER),
        (DIGIT, OTHER),
        (DIGIT, APOSTROPHE),
    ]
    pairs += [(OTHER, LETTER), (OTHER, DIGIT)]  # not after an apostrophe, which may begin 's
    splits = np.zeros(64, dtype=bool)
    splits[[before * 8 + after for before, after in pairs]] = True
    return kinds, splits
