"""Families of copies and near-copies among documents, so that a split can keep each family on one side.

Two documents belong to a family if their contents are equal, or if at least MIN_SHARED of the passages of PASSAGE bytes
of the smaller one occur in the other; families that share a document are one. Each document is represented by the
SKETCH_SIZE smallest hashes of its passages (a bottom-k sketch, Broder 1997), from which the share is estimated; the
standard error is below 0.03 for documents of one size, 0.1 if one is ten times as large. `datasketch` proposes pairs to
compare (MinHash and locality-sensitive hashing): of 1000 notes with later versions of twice and three times the size,
it missed one.

Pairs are missed on purpose where a passage is shared by more than MAX_CANDIDATES documents: each is compared with that
many, so that the time is linear in the number of documents.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tril.data.passages import HashSet, cover, distinct, passage_hashes

PASSAGE = 32  # bytes: about five words
MIN_SHARED = 0.3
SKETCH_SIZE = 512  # hashes per document: 4 kB
PROPOSAL_SIZE = 256  # of these, for MinHash
MAX_CANDIDATES = 32
N_PERMUTATIONS, N_BANDS = 128, 64  # proposes sketches with a Jaccard similarity of 0.3 with 99.8 %, of 0.2 with 93 %
LONG_PASSAGE = 150  # bytes: about 50 tokens, what `data.overlap` counts as a copy
SAMPLED = 4


class Sketch:
    """What is kept of a document: a hash of the content and the smallest hashes of its passages.

    Args:
        near: False keeps no passages, for `families(near=False)`.
    """

    def __init__(self, chunks: Iterable[bytes] = (), near: bool = True) -> None:
        self.near = near
        self.size = 0  # bytes
        self.hashes = np.empty(0, np.uint64)  # sorted; all passages with a hash up to `limit`
        self.limit = np.uint64(2**64 - 1)
        self._content = hashlib.blake2b(digest_size=16)
        self._rest = b""  # the start of the passages that reach into the next chunk
        for chunk in chunks:
            self.update(chunk)

    def update(self, chunk: bytes) -> None:
        """Adds the next bytes of the document."""
        self.size += len(chunk)
        self._content.update(chunk)
        if not self.near:
            return
        data = self._rest + chunk
        hashes = passage_hashes(np.frombuffer(data, np.uint8), PASSAGE)
        hashes = hashes[hashes <= self.limit]
        self.hashes = distinct(np.concatenate([self.hashes, hashes]))[:SKETCH_SIZE].copy()  # a view would keep them all
        if len(self.hashes) == SKETCH_SIZE:
            self.limit = self.hashes[-1]
        self._rest = data[-(PASSAGE - 1) :]

    @property
    def content(self) -> bytes:
        """Equal for documents with equal content."""
        return self._content.digest()


def shared(one: Sketch, other: Sketch) -> float:
    """The estimated share of the passages of the smaller document that occur in the other one; 0 without passages."""
    limit = min(one.limit, other.limit)
    a, b = (each.hashes[: np.searchsorted(each.hashes, limit, side="right")] for each in (one, other))
    if not len(a) or not len(b):
        return 0.0
    found = np.minimum(np.searchsorted(a, b), len(a) - 1)
    return int((a[found] == b).sum()) / min(len(a), len(b))


def families(sketches: Sequence[Sketch], near: bool = True) -> list[int]:
    """For each document the index of the first one of its family.

    Args:
        near: also near-copies; False: only documents of equal content.
    """
    first = list(range(len(sketches)))

    def root(i: int) -> int:
        while first[i] != i:
            first[i] = i = first[first[i]]
        return i

    def join(i: int, j: int) -> None:
        i, j = sorted((root(i), root(j)))
        first[j] = i

    copies: dict[bytes, int] = {}
    for i, sketch in enumerate(sketches):
        join(i, copies.setdefault(sketch.content, i))
    if near:
        different = sorted(copies.values())
        if len(different) > 1:
            _join_near(sketches, different, root, join)
    return [root(i) for i in range(len(sketches))]


def _join_near(
    sketches: Sequence[Sketch], documents: list[int], root: Callable[[int], int], join: Callable[[int, int], None]
) -> None:
    """Calls join(i, j) for near-copies among `documents`, the indices of documents of different content.

    Args:
        root: the first document of the family of a document.
    """
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(num_perm=N_PERMUTATIONS, params=(N_BANDS, N_PERMUTATIONS // N_BANDS))
    empty = MinHash(num_perm=N_PERMUTATIONS, seed=1, hashfunc=int, scheme="affine64")
    for i in documents:
        if not len(sketches[i].hashes):
            continue
        signature = empty.copy()
        signature.update_batch(sketches[i].hashes[:PROPOSAL_SIZE].tolist())
        candidates: list[Any] = index.query(signature)
        candidates.sort()
        for j in candidates[:MAX_CANDIDATES]:
            if root(i) != root(j) and shared(sketches[i], sketches[j]) >= MIN_SHARED:
                join(i, j)
        if len(candidates) < MAX_CANDIDATES:
            index.insert(i, signature, check_duplication=False)


def copied_shares(documents: Sequence[bytes]) -> list[float]:
    """For each document, about the share of its bytes in passages of LONG_PASSAGE bytes that occur in another document.

    One of SAMPLED passages is compared, so that memory is about 2 bytes per byte of text; passages overlap, so a few
    bytes at the ends of a copied text are missed.
    """

    def sample(document: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Hashes of all passages, and which of them are compared."""
        hashes = passage_hashes(np.frombuffer(document, np.uint8), LONG_PASSAGE)
        return hashes, hashes < np.uint64(2**64 // SAMPLED)

    samples = [np.empty(0, np.uint64)]
    for document in documents:
        hashes, is_sampled = sample(document)
        samples.append(distinct(hashes[is_sampled]))
    ordered = np.sort(np.concatenate(samples))
    repeated = HashSet(distinct(ordered[1:][ordered[1:] == ordered[:-1]]))
    shares = []
    for document in documents:
        hashes, is_copied = sample(document)
        is_copied[is_copied] = repeated.contains(hashes[is_copied])
        shares.append(int(cover(is_copied, LONG_PASSAGE).sum()) / max(len(document), 1))
    return shares
