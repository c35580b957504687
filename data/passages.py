"""Hashes of all passages of a text: of every window of `length` ids, where ids are bytes or tokens.

A passage x_0 ... x_(n-1) has the polynomial hash sum_k m(x_k) B^k modulo 2^64, where m maps each id to a fixed random
number. With Q_i = sum_(j<i) m(x_j) B^j, the hash of the passage at i is (Q_(i+n) - Q_i) B^(-i), so each position takes
a few vectorized operations for any length.

Letters: N ids, n ids in a passage.
"""

from functools import lru_cache

import numpy as np

BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
MASK = (1 << 64) - 1
CHUNK = 1 << 15  # passages hashed at a time: the arrays stay in the processor's cache
FILTER_LOAD = 16  # bits of the filter per passage: at most one in 16 other passages needs a search
MAX_FILTER_BITS = 28  # 32 MB


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
    for start in range(0, n_passages, CHUNK):
        count = min(CHUNK, n_passages - start)
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
    """BASE^j for j < CHUNK + length, and BASE^(-j) for j < CHUNK, modulo 2^64."""

    def powers(base: int, n: int) -> np.ndarray:
        factors = np.full(n, base, np.uint64)
        factors[0] = 1
        return np.cumprod(factors)

    return powers(BASE, CHUNK + length), powers(pow(BASE, -1, MASK + 1), CHUNK)


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
