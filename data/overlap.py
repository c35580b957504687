"""Text that occurs twice: how much of the validation part is also in the training part, and which documents share text.

Passages are windows of `length` ids, where ids are bytes or tokens. A passage x_0 ... x_(n-1) has the polynomial hash
sum_k m(x_k) B^k modulo 2^64, where m maps each id to a fixed random number. With Q_i = sum_(j<i) m(x_j) B^j, the hash
of the passage at i is (Q_(i+n) - Q_i) B^(-i), so each position takes a few vectorized operations for any length.

Letters: N ids, n ids in a passage, M distinct passages.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

PASSAGE_TOKENS = 50
PASSAGE_BYTES = 150  # 50 tokens of BPE; 50 single characters are too short to be a copy
SAMPLED = 4  # of the passages of a document, one in SAMPLED is compared
BLOCK = 1 << 23  # validation tokens that are compared with the training part at a time
CHUNK = 1 << 19  # ids that are hashed at a time
MAX_THREADS = 4

BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
STEP = 1 << 15  # passages hashed at a time: the arrays stay in the processor's cache
FILTER_LOAD = 16  # bits of the filter per passage: at most one in 16 other passages needs a search
MAX_FILTER_BITS = 28  # 32 MB


@dataclass(frozen=True)
class Overlap:
    """Validation tokens in passages of `passage_tokens` tokens that occur in training.

    share: of the tokens of the validation part.
    example: where in the validation part such a passage starts; None: there is none.
    """

    tokens: int
    share: float
    passage_tokens: int
    example: int | None


def measure_overlap(train: np.ndarray, val: np.ndarray, n_ids: int, bytes_per_token: float) -> Overlap:
    """Compares token ids (N,) of the training part and of the validation part, both below `n_ids`.

    A validation token counts if it lies in a passage of PASSAGE_TOKENS tokens, or more if these are fewer than
    PASSAGE_BYTES bytes, that occurs in the training part. The result is exact, apart from collisions of 64-bit hashes.
    Memory depends on the validation part alone, and is bounded by BLOCK.
    """
    length = max(PASSAGE_TOKENS, round(PASSAGE_BYTES / max(bytes_per_token, 1)))
    covered, example = 0, None
    for start in range(0, len(val), BLOCK):
        # the block and what its last passages need; passages that start in the block before reach into it
        before = min(start, length - 1)
        block = np.asarray(val[start - before : start + BLOCK + length - 1])
        is_covered = _covered(train, block, n_ids, length)[before : before + min(BLOCK, len(val) - start)]
        covered += int(is_covered.sum())
        if example is None and is_covered.any():
            example = start + int(is_covered.argmax())
    return Overlap(covered, covered / max(len(val), 1), length, example)


def _covered(train: np.ndarray, val: np.ndarray, n_ids: int, length: int) -> np.ndarray:
    """Whether each token of `val` (N,) lies in a passage that occurs in `train`, boolean (N,)."""
    positions = passage_hashes(val, length, n_ids)  # (N - n + 1,)
    passages = distinct(positions)  # (M,)
    if not len(passages):
        return np.zeros(len(val), dtype=bool)
    in_val, occurs = HashSet(passages), np.zeros(len(passages), dtype=bool)

    def find(start: int) -> None:
        occurs[in_val.find(passage_hashes(train[start : start + CHUNK + length - 1], length, n_ids))] = True

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        for _ in pool.map(find, range(0, len(train), CHUNK)):  # threads write the same value
            pass
    starts = HashSet(passages[occurs]).contains(positions) if occurs.any() else np.zeros(len(positions), dtype=bool)
    return cover(starts, length)


class Passages:
    """The passages of PASSAGE_BYTES bytes of a document that are compared: one in SAMPLED, chosen by its hash.

    They take about 3 bytes per byte of text.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.size, rest, hashes, starts = 0, b"", [], []
        for chunk in chunks:
            data = rest + chunk
            found = passage_hashes(np.frombuffer(data, np.uint8), PASSAGE_BYTES)
            compared = np.flatnonzero(found < np.uint64(2**64 // SAMPLED))
            hashes.append(found[compared])
            starts.append(compared + self.size - len(rest))
            self.size += len(chunk)
            rest = data[-(PASSAGE_BYTES - 1) :]  # the start of the passages that reach into the next chunk
        self.hashes = np.concatenate([np.empty(0, np.uint64), *hashes])
        self.starts = np.concatenate([np.empty(0, np.uint32), *starts]).astype(np.uint32)


def shared_parts(documents: Sequence[Passages]) -> list[float]:
    """For each document, about the share of its bytes in passages that occur in another document.

    Passages overlap, so a few bytes at the ends of a copied text are missed.
    """
    ordered = np.sort(np.concatenate([distinct(document.hashes) for document in documents]))
    repeated = HashSet(distinct(ordered[1:][ordered[1:] == ordered[:-1]]))
    shares = []
    for document in documents:
        is_shared = np.zeros(max(document.size - PASSAGE_BYTES + 1, 0), dtype=bool)
        is_shared[document.starts[repeated.contains(document.hashes)]] = True
        shares.append(int(cover(is_shared, PASSAGE_BYTES).sum()) / max(document.size, 1))
    return shares


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
    n_passages = max(len(ids) - length + 1, 0)
    hashes = np.empty(n_passages, np.uint64)
    values, powers, inverses = id_hashes(n_ids), *_powers(length)
    for start in range(0, n_passages, STEP):
        count = min(STEP, n_passages - start)
        terms = values[ids[start : start + count + length - 1]]  # (count + length - 1,)
        terms *= powers[: len(terms)]
        sums = np.cumsum(terms, out=terms)
        part = hashes[start : start + count]
        part[0] = sums[length - 1]
        np.subtract(sums[length:], sums[: count - 1], out=part[1:])
        part *= inverses[:count]
    return hashes


@lru_cache(maxsize=4)
def _powers(length: int) -> tuple[np.ndarray, np.ndarray]:
    """BASE^j for j < STEP + length, and BASE^(-j) for j < STEP, modulo 2^64."""

    def powers(base: int, n: int) -> np.ndarray:
        factors = np.full(n, base, np.uint64)
        factors[0] = 1
        return np.cumprod(factors)

    return powers(BASE, STEP + length), powers(pow(BASE, -1, 1 << 64), STEP)


def distinct(hashes: np.ndarray) -> np.ndarray:
    """The distinct values, sorted. numpy.unique takes 80 times as long on random 64-bit integers (numpy 2.4)."""
    ordered = np.sort(hashes)
    keep = np.ones(len(ordered), dtype=bool)
    np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
    return ordered[keep]


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


class HashSet:
    """A set of 64-bit hashes, sorted, with a filter of one bit per value of their upper bits."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = hashes  # (M,)
        n_bits = min(max((FILTER_LOAD * len(hashes)).bit_length(), 3), MAX_FILTER_BITS)
        self.shift = np.uint64(64 - n_bits)
        is_possible = np.zeros(1 << n_bits, dtype=bool)
        is_possible[(hashes >> self.shift).view(np.int64)] = True
        self.filter = np.packbits(is_possible, bitorder="little")

    def is_possible(self, hashes: np.ndarray) -> np.ndarray:
        """False where a hash is certainly not in the set."""
        upper = hashes >> self.shift
        octets = self.filter[(upper >> np.uint64(3)).view(np.int64)]
        return (octets >> (upper & np.uint64(7)).astype(np.uint8) & np.uint8(1)).view(bool)

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Indices in the set of those `hashes` that it contains, in no order."""
        possible = np.sort(hashes[self.is_possible(hashes)])  # sorted queries stay in the processor's cache
        found = np.minimum(np.searchsorted(self.hashes, possible), len(self.hashes) - 1)
        return found[self.hashes[found] == possible]

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """Whether the set contains each of `hashes`, boolean of the same shape."""
        if not len(self.hashes):
            return np.zeros(len(hashes), dtype=bool)
        result = self.is_possible(hashes)
        possible = hashes[result]
        found = np.minimum(np.searchsorted(self.hashes, possible), len(self.hashes) - 1)
        result[result] = self.hashes[found] == possible
        return result
