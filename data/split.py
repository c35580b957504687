"""Which documents are for validation, by one rule for every text.

Documents that share long passages with others are for training. Of the others, those come first whose names have the
smallest hash, until the wanted share is reached, so that every machine agrees. Where whole documents cannot give that
share, as with one file, the end of each document is for validation. Texts of too many rows to compare are split by a
hash of the content of each row.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from tril.data.cache import PROGRESS
from tril.data.overlap import PASSAGE_BYTES, contains, covered, distinct, passages
from tril.data.sources.base import Document, Source, Split

TOLERANCE = 1.5  # the share of the validation part is at most this factor from the wanted one
MAX_DOCUMENTS = 10_000  # with more, memory and time to compare them become noticeable
MAX_BYTES = 1 << 27  # of text that is compared, in 1 to 3 s; of more, only equal documents are found
MAX_SHARED = 0.01  # of a validation document
MAX_DOCUMENT = 0.12  # of the validation part, if the other documents are enough
SAMPLED = 4  # of the passages of a document, one in SAMPLED is compared
BY_CONTENT = "rows by a hash of their content"
SEARCH = 1 << 16  # bytes after the wanted position in which a boundary is looked for
# Where a text may be cut, the best first: at the start of a line, before white space, at the start of a character.
BOUNDARIES = [re.compile(each, re.DOTALL) for each in (rb"(?<=\n).", rb"(?<=.)[ \t\r\v\f]", rb"(?<=.)[^\x80-\xbf]")]


class Plan(NamedTuple):
    """How a source is split: the rule, for the user, and the text of a document that is in a part ("" for none)."""

    rule: str
    part: Callable[[Document, Split], str]


class Content(NamedTuple):
    """What is kept of a document to compare it with others.

    Attributes:
        size: in bytes.
        digest: equal for equal documents.
        hashes, starts: of the passages of PASSAGE_BYTES bytes that are compared: one in SAMPLED, chosen by its hash.
            They take about 3 bytes per byte of text. None of a document that is only compared as a whole.
    """

    size: int
    digest: bytes
    hashes: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, text: str, *, with_passages: bool = True) -> "Content":
        data = text.encode()
        hashes, starts = [np.empty(0, np.uint64)], [np.empty(0, np.uint32)]
        for start, part in passages(np.frombuffer(data if with_passages else b"", np.uint8), PASSAGE_BYTES):
            sampled = np.flatnonzero(part < np.uint64(2**64 // SAMPLED))
            hashes.append(part[sampled])
            starts.append((sampled + start).astype(np.uint32))
        digest = hashlib.blake2b(data, digest_size=16).digest()
        return cls(len(data), digest, np.concatenate(hashes), np.concatenate(starts))

    def shared(self, repeated: np.ndarray) -> float:
        """About the share of the bytes in passages of `repeated`, hashes in order.

        Passages overlap, so a few bytes at the ends of a copied text are missed.
        """
        own = distinct(self.hashes)
        own = own[contains(repeated, own)]  # few are left, and sorted values are found faster
        return covered(self.starts[contains(own, self.hashes)], PASSAGE_BYTES) / max(self.size, 1)


def plan_split(source: Source) -> Plan:
    """Decides the split of a source, for which all its documents are read once.

    Raises:
        ValueError: a document cannot be read.
    """
    if source.own_split is not None:
        return Plan(source.own_split, lambda document, split: document.text)
    fraction = source.val_fraction
    contents, with_rows = ({}, False) if source.by_content else read_contents(source)
    val, rules = choose_val(contents, fraction), [] if with_rows else [BY_CONTENT]
    if val is not None:
        rules.append(f"{len(val)} of {len(contents)} documents that share no passages with others")
    elif len(contents) > 1:
        rules.append(f"the end of each of {len(contents)} documents, as no whole ones have about that share")
    elif contents:
        rules.append("the end of the text")

    def part(document: Document, split: Split) -> str:
        name, text, is_row = document
        if is_row and not with_rows:  # all copies of a row are in one part
            digest = hashlib.sha256(text.strip().encode()).digest()
            is_val = int.from_bytes(digest[:8], "big") < fraction * 2**64
        elif val is None:
            return split_text(text, fraction)[split == "val"]
        else:
            is_val = name in val
        return text if is_val == (split == "val") else ""

    return Plan("; ".join(rules), part)


def read_contents(source: Source) -> tuple[dict[str, Content], bool]:
    """The documents to compare, by name, and whether rows are among them: not if there are too many."""
    texts, rows, n_rows, size = dict[str, Content](), dict[str, Content](), 0, 0
    for name, text, is_row in tqdm(source.documents("train"), "reading the text", unit=" documents", **PROGRESS):
        n_rows += is_row and bool(text)
        if text and not (is_row and len(texts) + n_rows > MAX_DOCUMENTS):
            content = Content.of(text.strip() if is_row else text, with_passages=size <= MAX_BYTES)
            (rows if is_row else texts)[name] = content
            size += content.size
    with_rows = not n_rows or len(texts) + n_rows <= MAX_DOCUMENTS
    return (texts | rows if with_rows else texts), with_rows


def choose_val(documents: Mapping[str, Content], val_fraction: float) -> frozenset[str] | None:
    """The names of the documents for validation.

    Returns:
        None: whole documents cannot give a share within a factor TOLERANCE of `val_fraction`.
    """
    copies = Counter(document.digest for document in documents.values())
    total = sum(document.size for document in documents.values())
    compared = documents.values() if total <= MAX_BYTES else ()
    ordered = np.concatenate([np.empty(0, np.uint64), *(distinct(each.hashes) for each in compared)])
    ordered.sort()  # in place: these are 2 bytes per byte of text
    repeated = distinct(ordered[1:][ordered[1:] == ordered[:-1]])  # in several documents
    target, size, chosen = val_fraction * total, 0, set()
    clean = {
        name: document.size
        for name, document in documents.items()
        if copies[document.digest] == 1 and document.shared(repeated) <= MAX_SHARED
    }
    small = {name: size for name, size in clean.items() if size <= MAX_DOCUMENT * target}
    candidates = small if sum(small.values()) >= target else clean
    for name in sorted(candidates, key=lambda name: hashlib.sha256(os.fsencode(name)).digest()):
        larger = size + candidates[name]
        if larger <= TOLERANCE * target and abs(larger - target) < abs(size - target):
            chosen.add(name)
            size = larger
    return frozenset(chosen) if target / TOLERANCE <= size < total else None


def split_text(text: str, val_fraction: float) -> tuple[str, str]:
    """A text and its end: cut at the best of the BOUNDARIES near the wanted position."""
    data = text.encode()
    wanted = round(len(data) * val_fraction)
    if wanted == 0:
        return text, ""
    start = max(int(len(data) * (1 - val_fraction)), 1) - 1
    window = data[start : start + 1 + min(max(wanted // 3, 4), SEARCH)]
    cuts = (match.start() for boundary in BOUNDARIES if (match := boundary.search(window)))
    cut = start + next(cuts, len(window))
    return data[:cut].decode(), data[cut:].decode()
