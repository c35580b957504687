"""Which documents are for validation: one rule for every text.

Documents that share long passages with others are for training. Of the others, those come first whose names have the
smallest hash, until the wanted share is reached, so that every machine agrees. Where whole documents cannot give that
share, as with one file, the end of each document is for validation. Texts of too many rows to compare are split by a
hash of the content of each row.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

TOLERANCE = 1.5  # the share of the validation part is at most this factor from the wanted one
MAX_DOCUMENTS = 10_000  # with more, memory and time to compare them become noticeable
MAX_BYTES = 1 << 27  # of text that is compared, in 1 to 3 s; of more, only equal documents are found
MAX_SHARED = 0.01  # of a validation document
MAX_DOCUMENT = 0.12  # of the validation part, if the other documents are enough
BY_CONTENT = "rows by a hash of their content"
SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for


class Plan(NamedTuple):
    """How the documents of a source are split.

    Attributes:
        val: names of the documents for validation; None: the end of each document.
        by_content: rows are split by a hash of their content.
        rule: for the user.
    """

    val: frozenset[str] | None
    by_content: bool
    rule: str


class Content:
    """What is kept of a document to compare it with others; `compare=False`: only whether another one is equal."""

    def __init__(self, text: str, compare: bool = True) -> None:
        from tril.data.overlap import sample_passages

        data = text.encode()
        self.size, self.digest = len(data), hashlib.blake2b(data, digest_size=16).digest()
        self.hashes, self.starts = sample_passages(data if compare else b"")


def plan_split(
    documents: Iterable[tuple[str, str, str | None]], val_fraction: float, salt: str, *, compare: bool
) -> Plan:
    """Decides the split of documents, each with its name, text and key; reads all of them once.

    Args:
        salt: put before each name for its hash.
        compare: False: only equal documents are found.

    Raises:
        ValueError: a document cannot be read.
    """
    texts: dict[str, Content] = {}
    rows: dict[str, Content] = {}
    n_rows = 0
    for name, text, key in documents:
        if key is None:
            texts[name] = Content(text, compare)
        elif text:
            n_rows += 1
            if len(texts) + n_rows <= MAX_DOCUMENTS:
                rows[name] = Content(key, compare)
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
    return Plan(val, by_content, rule)


def choose_val(documents: Mapping[str, Content], val_fraction: float, salt: str = "") -> frozenset[str] | None:
    """The names of the documents for validation.

    Args:
        documents: by name.
        salt: put before each name for its hash.

    Returns:
        None: whole documents cannot give a share within a factor TOLERANCE of `val_fraction`.
    """
    from tril.data.overlap import shared_parts

    copies = Counter(document.digest for document in documents.values())
    shares = shared_parts([(each.size, each.hashes, each.starts) for each in documents.values()])
    total = sum(document.size for document in documents.values())
    target, size, chosen = val_fraction * total, 0, set()
    clean = {
        name: document.size
        for (name, document), share in zip(documents.items(), shares, strict=True)
        if share <= MAX_SHARED and copies[document.digest] == 1
    }
    small = {name: size for name, size in clean.items() if size <= MAX_DOCUMENT * target}
    candidates = small if sum(small.values()) >= target else clean
    for name in sorted(candidates, key=lambda name: hashlib.sha256(os.fsencode(salt + name)).digest()):
        larger = size + candidates[name]
        if larger <= TOLERANCE * target and abs(larger - target) < abs(size - target):
            chosen.add(name)
            size = larger
    return frozenset(chosen) if target / TOLERANCE <= size < total else None


def in_validation(content: str, val_fraction: float) -> bool:
    """Whether a row is for validation: a hash of its content decides, which puts all copies on one side."""
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") < val_fraction * 2**64


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
