"""Passages that occur in several texts, found by hashes; and how much of the validation part occurs in training.

Passages are windows of `length` ids, where ids are bytes or tokens. A passage x_0 ... x_(n-1) has the polynomial hash
sum_k m(x_k) B^k modulo 2^64, where m maps each id to a fixed random number.

Letters: N ids, n ids in a passage, M distinct passages.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

PASSAGE_TOKENS = 50
PASSAGE_BYTES = 150  # 50 tokens of BPE; 50 single characters are too short to be a copy
CHUNK = 1 << 19  # ids that are hashed at a time

BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


def measure_overlap(train: np.ndarray, val: np.ndarray, n_ids: int, bytes_per_token: float) -> dict[str, Any]:
    """Compares token ids (N,) of the training part and of the validation part, both below `n_ids`.

    A validation token counts if it lies in a passage of PASSAGE_TOKENS tokens, or more if these are fewer than
    PASSAGE_BYTES bytes, that occurs in the training part. The result is exact, apart from collisions of 64-bit hashes.
    It takes about 40 bytes of memory for each token of the validation part.

    Returns:
        "tokens" that count, their "share" of the validation part, and the "passage_tokens" of a passage.
    """
    length = max(PASSAGE_TOKENS, round(PASSAGE_BYTES / max(bytes_per_token, 1)))
    tokens = covered(np.flatnonzero(occurring(train, val, length, n_ids)), length)
    return {"tokens": tokens, "share": tokens / max(len(val), 1), "passage_tokens": length}


def occurring(train: np.ndarray, val: np.ndarray, length: int, n_ids: int) -> np.ndarray:
    """Whether each passage of `length` ids of the validation part occurs in training: boolean (N - length + 1,)."""
    in_val = np.concatenate([np.empty(0, np.uint64), *(hashes for _, hashes in passages(val, length, n_ids))])
    known = distinct(in_val)  # (M,)
    occurs = np.zeros(len(known), dtype=bool)
    for _, hashes in passages(train, length, n_ids):
        occurs |= contains(np.sort(hashes), known)
    return contains(known[occurs], in_val)


def passages(ids: np.ndarray, length: int, n_ids: int = 256) -> Iterator[tuple[int, np.ndarray]]:
    """The hash of every passage of `length` ids, in order.

    Args:
        ids: (N,) unsigned integers below `n_ids`.

    Yields:
        the number of a passage, and the hashes of that and the next ones, uint64 (at most CHUNK,). The upper bits are
        the better ones.
    """
    random = np.arange(1, n_ids + 1, dtype=np.uint64) * np.uint64(BASE)  # splitmix64 (Steele, Lea and Flood 2014)
    random = (random ^ (random >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    random = (random ^ (random >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    random = random ^ (random >> np.uint64(31))  # m, (n_ids,)
    size = min(CHUNK + length - 1, len(ids))
    powers = np.cumprod(np.full(size, BASE, np.uint64))  # B^1 ... B^size
    inverses = np.cumprod(np.full(size, pow(BASE, -1, 1 << 64), np.uint64))
    for start in range(0, len(ids) - length + 1, CHUNK):
        part = random[ids[start : start + size]]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(part * powers[: len(part)])])  # sum_k<i m(x_k) B^(k+1)
        hashes = sums[length:] - sums[:-length]  # of the passage at i, times B^(i+1)
        yield start, hashes * inverses[: len(hashes)]


def distinct(hashes: np.ndarray) -> np.ndarray:
    """The distinct values, sorted. numpy.unique takes 80 times as long on random 64-bit integers (numpy 2.4)."""
    ordered = np.sort(hashes)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])[: len(ordered)]]


def contains(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each of `values` occurs in `ordered`, which is sorted: boolean of the shape of `values`."""
    if not len(ordered):
        return np.zeros(len(values), dtype=bool)
    return ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values


def covered(starts: np.ndarray, length: int) -> int:
    """The number of ids in passages of `length` ids that start at these positions, which are in order."""
    return int(np.minimum(np.diff(starts), length).sum()) + length * bool(len(starts))
