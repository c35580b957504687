"""Which documents are for validation: one rule for every text.

Documents that share long passages with others are for training. Of the others, those come first whose names have the
smallest hash, until the wanted share is reached, so that every machine agrees. Where whole documents cannot give that
share, as with one file, the end of each document is for validation. Texts of too many rows to compare are split by a
hash of the content of each row.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from tril.data.overlap import sample_passages, shared_parts
from tril.data.sources.base import Split

TOLERANCE = 1.5  # the share of the validation part is at most this factor from the wanted one
MAX_DOCUMENTS = 10_000  # with more, memory and time to compare them become noticeable
MAX_BYTES = 1 << 27  # of text that is compared, in 1 to 3 s; of more, only equal documents are found
MAX_SHARED = 0.01  # of a validation document
MAX_DOCUMENT = 0.12  # of the validation part, if the other documents are enough
SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for


class Document:
    """What is kept of a document to compare it with others.

    Args:
        chunks: its bytes.
        compare: False: it is only known whether another one is equal, and `chunks` are read one at a time.
    """

    def __init__(self, chunks: Iterable[bytes], compare: bool = True) -> None:
        chunks, digest, self.size = [b"".join(chunks)] if compare else chunks, hashlib.blake2b(digest_size=16), 0
        self.hashes, self.starts = np.empty(0, np.uint64), np.empty(0, np.uint32)
        for chunk in chunks:
            self.size += len(chunk)
            digest.update(chunk)
            if compare:
                self.hashes, self.starts = sample_passages(chunk)
        self.digest = digest.digest()


def choose_val(documents: Mapping[str, Document], val_fraction: float, salt: str = "") -> frozenset[str]:
    """The names of the documents for validation.

    Args:
        documents: by name.
        salt: put before each name for its hash.

    Raises:
        ValueError: whole documents cannot give a share within a factor TOLERANCE of `val_fraction`.
    """
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
    for name in sorted(candidates, key=lambda name: hash_of(salt + name)):
        larger = size + candidates[name]
        if larger <= TOLERANCE * target and abs(larger - target) < abs(size - target):
            chosen.add(name)
            size = larger
    if target / TOLERANCE <= size < total:
        return frozenset(chosen)
    cause = f"data.val_fraction={val_fraction} cannot be met with {len(documents)} whole documents"
    remedy = "change it, give more text, or give other files with data.val_path"
    raise ValueError(f"{cause}, of which those that share text with others are for training; {remedy}")


def in_split(text: bytes, split: Split, val_fraction: float) -> bool:
    """Whether a row belongs to `split`: a hash of its content decides, which puts all copies on one side."""
    return (int.from_bytes(hash_of(text)[:8], "big") < val_fraction * 2**64) == (split == "val")


def row_content(text: str) -> bytes:
    return text.strip().encode("utf-8", "replace")


def hash_of(key: str | bytes) -> bytes:
    return hashlib.sha256(key if isinstance(key, bytes) else os.fsencode(key)).digest()


def split_position(read: Callable[[int, int], bytes], size: int, val_fraction: float) -> int:
    """Where the validation part of a text of `size` bytes starts: near the wanted position, at the first start of a
    line, else the first white space, else the first start of a character.

    Args:
        read: (start, end) -> the bytes between.
    """
    wanted = round(size * val_fraction)
    if wanted == 0:
        return size
    position = max(int(size * (1 - val_fraction)), 1)
    window = read(position - 1, min(position + min(max(wanted // 3, 4), SEARCH), size))
    if line_end := window.find(b"\n", 0, len(window) - 1) + 1:  # at the end it would leave nothing
        return position - 1 + line_end
    blank = next((i for i in range(1, len(window)) if window[i] in b" \t\r\v\f"), None)
    characters = (i for i in range(1, len(window)) if window[i] & 0xC0 != 0x80)  # not inside a UTF-8 sequence
    return min(position - 1 + (blank or next(characters, len(window))), size)
