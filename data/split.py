"""Which documents are for validation, by one rule for every text.

Documents that share long passages with others are for training. Of the others, those come first whose names have the
smallest hash, until the wanted share is reached, so that every machine agrees. Where whole documents cannot give that
share, as with one file, the end of each document is for validation. Texts of too many rows to compare are split by a
hash of the content of each row.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from tril.data.cache import PROGRESS
from tril.data.overlap import CHUNK, PASSAGE_BYTES, contains, cover, distinct, passage_hashes
from tril.data.sources.base import Document, Source, Split

TOLERANCE = 1.5  # the share of the validation part is at most this factor from the wanted one
MAX_DOCUMENTS = 10_000  # with more, memory and time to compare them become noticeable
MAX_BYTES = 1 << 27  # of text that is compared, in 1 to 3 s; of more, only equal documents are found
MAX_SHARED = 0.01  # of a validation document
MAX_DOCUMENT = 0.12  # of the validation part, if the other documents are enough
SAMPLED = 4  # of the passages of a document, one in SAMPLED is compared
BY_CONTENT = "rows by a hash of their content"
SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for


class Plan(NamedTuple):
    """How a source is split: the rule, for the user, and the text of a document that is in a part ("" for none)."""

    rule: str
    part: Callable[[Document, Split], str]


def plan_split(source: Source) -> Plan:
    """Decides the split of a source, for which all its documents are read once.

    Raises:
        ValueError: a document cannot be read.
    """
    if source.own_split is not None:
        return Plan(source.own_split, lambda document, split: document.text)
    fraction = source.val_fraction
    compared, with_rows = ({}, False) if source.by_content else read_contents(source)
    val, rules = choose_val(compared, fraction, source.salt), [] if with_rows else [BY_CONTENT]
    if val is not None:
        rules.append(f"{len(val)} of {len(compared)} documents that share no passages with others")
    elif len(compared) > 1:
        rules.append(f"the end of each of {len(compared)} documents, as no whole ones have about that share")
    elif compared:
        rules.append("the end of the text")

    def part(document: Document, split: Split) -> str:
        if document.is_row and not with_rows:
            return part_by_content(document.text, fraction, split)
        if val is None:
            return split_text(document.text, fraction)[split == "val"]
        return document.text if (document.name in val) == (split == "val") else ""

    return Plan("; ".join(rules), part)


def part_by_content(text: str, val_fraction: float, split: Split) -> str:
    """A row, if it is in `split`: a hash of its content decides, so that all copies of a row are in one part."""
    digest = hashlib.sha256(text.strip().encode()).digest()
    is_val = int.from_bytes(digest[:8], "big") < val_fraction * 2**64
    return text if is_val == (split == "val") else ""


def read_contents(source: Source) -> "tuple[dict[str, Content], bool]":
    """The documents to compare, by name, and whether rows are among them: not if there are too many."""
    texts, rows, n_rows, size = dict[str, Content](), dict[str, Content](), 0, 0
    for name, text, is_row in tqdm(source.documents("train"), "reading the text", unit=" documents", **PROGRESS):
        n_rows += is_row and bool(text)
        if text and not (is_row and len(texts) + n_rows > MAX_DOCUMENTS):
            content = Content(text.strip() if is_row else text, compare=size <= MAX_BYTES)
            (rows if is_row else texts)[name] = content
            size += content.size
    with_rows = not n_rows or len(texts) + n_rows <= MAX_DOCUMENTS
    return (texts | rows if with_rows else texts), with_rows


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


def choose_val(documents: Mapping[str, Content], val_fraction: float, salt: str = "") -> frozenset[str] | None:
    """The names of the documents for validation.

    Args:
        documents: by name.
        salt: put before each name for its hash.

    Returns:
        None: whole documents cannot give a share within a factor TOLERANCE of `val_fraction`.
    """
    copies = Counter(document.digest for document in documents.values())
    total = sum(document.size for document in documents.values())
    compared = documents.values() if total <= MAX_BYTES else ()
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *(distinct(each.hashes) for each in compared)]))
    repeated = distinct(ordered[1:][ordered[1:] == ordered[:-1]])  # in several documents
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
