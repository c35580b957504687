"""Which documents are for validation, by one rule for every text; and how much of the validation part occurs twice.

Documents that share long passages with others are for training. Of the others, those come first whose names have the
smallest hash, until the wanted share is reached, so that every machine agrees. Where whole documents cannot give that
share, as with one file, the end of each document is for validation. Texts of too many rows to compare are split by a
hash of the content of each row.

Passages are windows of `length` ids, where ids are bytes or tokens. A passage x_0 ... x_(n-1) has the polynomial hash
h = sum_k m(x_k) B^k modulo 2^64, where m maps each id to a fixed random number. The hash of two passages, one after the
other, is h + B^n h', so a few vectorized operations give those of passages of any length.

Letters: N ids, n ids in a passage, M distinct passages.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tril.data.sources.base import Document, Split

TOLERANCE = 1.5  # the share of the validation part is at most this factor from the wanted one
MAX_DOCUMENTS = 10_000  # with more, memory and time to compare them become noticeable
MAX_BYTES = 1 << 27  # of text that is compared, in 1 to 3 s; of more, only equal documents are found
MAX_SHARED = 0.01  # of a validation document
MAX_DOCUMENT = 0.12  # of the validation part, if the other documents are enough
BY_CONTENT = "rows by a hash of their content"
SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for

PASSAGE_TOKENS = 50
PASSAGE_BYTES = 150  # 50 tokens of BPE; 50 single characters are too short to be a copy
SAMPLED = 4  # of the passages of a document, one in SAMPLED is compared
CHUNK = 1 << 19  # ids that are hashed at a time
MAX_THREADS = 4

BASE = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0 modulo 2^64


class Plan(NamedTuple):
    """How the documents of a source are split.

    Attributes:
        val_fraction: the wanted share of the validation part.
        val: names of the documents for validation; None: the end of each document.
        by_content: rows are split by a hash of their content.
        rule: for the user.
    """

    val_fraction: float
    val: frozenset[str] | None
    by_content: bool
    rule: str

    def part(self, document: "Document", split: "Split") -> str:
        """The text of a document that is in `split`. Of rows that are split by content, all copies are in one part."""
        if self.by_content and document.is_row:
            digest = hashlib.sha256(document.text.strip().encode()).digest()
            is_val = int.from_bytes(digest[:8], "big") < self.val_fraction * 2**64
        elif self.val is not None:
            is_val = document.name in self.val
        else:
            return split_text(document.text, self.val_fraction)[split == "val"]
        return document.text if is_val == (split == "val") else ""


class Content:
    """What is kept of a document to compare it with others; `compare=False`: only whether another one is equal.

    Attributes:
        size: in bytes.
        hashes, starts: of the passages of PASSAGE_BYTES bytes that are compared: one in SAMPLED, chosen by its hash.
            They take about 3 bytes per byte of text.
    """

    def __init__(self, text: str, compare: bool = True) -> None:
        data = text.encode()
        self.size, self.digest = len(data), hashlib.blake2b(data, digest_size=16).digest()
        hashes, starts = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
        ids = np.frombuffer(data if compare else b"", np.uint8)
        for start in range(0, len(ids), CHUNK):
            part = passage_hashes(ids[start : start + CHUNK + PASSAGE_BYTES - 1], PASSAGE_BYTES)
            compared = np.flatnonzero(part < np.uint64(2**64 // SAMPLED))
            hashes.append(part[compared])
            starts.append((compared + start).astype(np.uint32))
        self.hashes, self.starts = np.concatenate(hashes), np.concatenate(starts)

    def shared(self, repeated: np.ndarray) -> float:
        """About the share of the bytes in passages of `repeated`, hashes in order.

        Passages overlap, so a few bytes at the ends of a copied text are missed.
        """
        is_shared = np.zeros(max(self.size - PASSAGE_BYTES + 1, 0), dtype=bool)
        is_shared[self.starts[contains(repeated, self.hashes)]] = True
        return int(cover(is_shared, PASSAGE_BYTES).sum()) / max(self.size, 1)


def plan_split(documents: "Iterable[Document]", val_fraction: float, salt: str, *, compare: bool) -> Plan:
    """Decides the split of documents; reads all of them once.

    Args:
        salt: put before each name for its hash.
        compare: False: only equal documents are found.

    Raises:
        ValueError: a document cannot be read.
    """
    texts: dict[str, Content] = {}
    rows: dict[str, Content] = {}
    n_rows = 0
    for name, text, is_row in documents:
        if not is_row:
            texts[name] = Content(text, compare)
        elif text:
            n_rows += 1
            if len(texts) + n_rows <= MAX_DOCUMENTS:
                rows[name] = Content(text.strip(), compare)
    by_content = len(texts) + n_rows > MAX_DOCUMENTS and n_rows > 0
    compared = texts if by_content else texts | rows
    n, val = len(compared), choose_val(compared, val_fraction, salt)
    if val is not None:
        rule = f"{len(val)} of {n} documents that share no passages with others"
    elif n > 1:
        rule = f"the end of each of {n} documents (whole ones would miss data.val_fraction by a factor of {TOLERANCE})"
    else:
        rule = "the end of the text"
    if by_content:
        rule = BY_CONTENT + (f"; {rule}" if compared else "")
    return Plan(val_fraction, val, by_content, rule)


def choose_val(documents: Mapping[str, Content], val_fraction: float, salt: str = "") -> frozenset[str] | None:
    """The names of the documents for validation.

    Args:
        documents: by name.
        salt: put before each name for its hash.

    Returns:
        None: whole documents cannot give a share within a factor TOLERANCE of `val_fraction`.
    """
    copies = Counter(document.digest for document in documents.values())
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *(distinct(each.hashes) for each in documents.values())]))
    repeated = distinct(ordered[1:][ordered[1:] == ordered[:-1]])  # in several documents
    total = sum(document.size for document in documents.values())
    target, size, chosen = val_fraction * total, 0, set()
    clean = {
        name: document.size
        for name, document in documents.items()
        if copies[document.digest] == 1 and document.shared(repeated) <= MAX_SHARED
    }
    small = {name: size for name, size in clean.items() if size <= MAX_DOCUMENT * target}
    candidates = small if sum(small.values()) >= target else clean
    for name in sorted(candidates, key=lambda name: hashlib.sha256(os.fsencode(salt + name)).digest()):
        larger = size + candidates[name]
        if larger <= TOLERANCE * target and abs(larger - target) < abs(size - target):
            chosen.add(name)
            size = larger
    return frozenset(chosen) if target / TOLERANCE <= size < total else None


def split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """A text and its end: cut near the wanted position, at the first start of a line, else at the first white space,
    else at the first start of a character.
    """
    data = text.encode()
    wanted = round(len(data) * val_fraction)
    if wanted == 0:
        return text, ""
    position = max(int(len(data) * (1 - val_fraction)), 1)
    window = data[position - 1 : position + min(max(wanted // 3, 4), SEARCH)]
    if not (found := window.find(b"\n", 0, len(window) - 1) + 1):  # at the end it would leave nothing
        blanks = (i for i in range(1, len(window)) if window[i] in b" \t\r\v\f")
        characters = (i for i in range(1, len(window)) if window[i] & 0xC0 != 0x80)  # not inside a UTF-8 sequence
        found = next(blanks, None) or next(characters, len(window))
    return data[: position - 1 + found].decode(), data[position - 1 + found :].decode()


def measure_overlap(train: np.ndarray, val: np.ndarray, n_ids: int, bytes_per_token: float) -> dict[str, Any]:
    """Compares token ids (N,) of the training part and of the validation part, both below `n_ids`.

    A validation token counts if it lies in a passage of PASSAGE_TOKENS tokens, or more if these are fewer than
    PASSAGE_BYTES bytes, that occurs in the training part. The result is exact, apart from collisions of 64-bit hashes.
    It takes about 40 bytes of memory for each token of the validation part.

    Returns:
        "tokens" that count, their "share" of the validation part, and the "passage_tokens" of a passage.
    """
    length = max(PASSAGE_TOKENS, round(PASSAGE_BYTES / max(bytes_per_token, 1)))
    in_val = passage_hashes(val, length, n_ids)  # (N - n + 1,)
    passages = distinct(in_val)  # (M,)
    occurs = np.zeros(len(passages), dtype=bool)

    def find(start: int) -> None:
        hashes = np.sort(passage_hashes(train[start : start + CHUNK + length - 1], length, n_ids))
        occurs[contains(hashes, passages)] = True

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        for _ in pool.map(find, range(0, len(train) if len(passages) else 0, CHUNK)):  # threads write the same value
            pass
    tokens = int(cover(contains(passages[occurs], in_val), length).sum())
    return {"tokens": tokens, "share": tokens / max(len(val), 1), "passage_tokens": length}


@lru_cache(maxsize=4)
def id_hashes(n_ids: int) -> np.ndarray:
    """A fixed random number per id, uint64 (n_ids,): splitmix64 (Steele, Lea and Flood 2014) of the id."""
    values = np.arange(1, n_ids + 1, dtype=np.uint64) * np.uint64(BASE)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def passage_hashes(ids: np.ndarray, length: int, n_ids: int = 256) -> np.ndarray:
    """The hash of every passage of `length` ids.

    Args:
        ids: (N,) unsigned integers below `n_ids`.

    Returns:
        uint64 (N - length + 1,), empty if N < length. The upper bits are the better ones.
    """
    single = id_hashes(n_ids)[ids]
    hashes, n = single, 1  # of the passages of n ids; n are the upper bits of `length`
    for bit in f"{length:b}"[1:]:
        hashes, n = hashes[:-n] + hashes[n:] * _power(n), 2 * n
        if bit == "1":
            hashes, n = hashes[:-1] + single[n:] * _power(n), n + 1
    return hashes


def _power(n: int) -> np.uint64:
    return np.uint64(pow(BASE, n, 1 << 64))


def distinct(hashes: np.ndarray) -> np.ndarray:
    """The distinct values, sorted. numpy.unique takes 80 times as long on random 64-bit integers (numpy 2.4)."""
    ordered = np.sort(hashes)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)]]


def contains(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each of `values` occurs in `ordered`, which is sorted: boolean of the shape of `values`."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values


def cover(starts: np.ndarray, length: int) -> np.ndarray:
    """Whether each id lies in a marked passage.

    Args:
        starts: boolean (N - length + 1,), whether the passage at each position is marked.

    Returns:
        boolean (N,); empty if there is no passage.
    """
    if not len(starts):
        return np.zeros(0, dtype=bool)
    changes = np.zeros(len(starts) + length, np.int32)
    changes[: len(starts)] += starts
    changes[length:] -= starts
    return np.cumsum(changes)[:-1] > 0
