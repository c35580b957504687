"""Passages that occur in several texts, found by hashes; and how much of the validation part occurs in training.

Passages are windows of `length` ids, where ids are bytes or tokens. A passage x_0 ... x_(n-1) has the polynomial hash
h = sum_k m(x_k) B^k modulo 2^64, where m maps each id to a fixed random number. The hash of two passages, one after the
other, is h + B^n h', so a few vectorized operations give those of passages of any length.

Letters: N ids, n ids in a passage, M distinct passages.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

PASSAGE_TOKENS = 50
PASSAGE_BYTES = 150  # 50 tokens of BPE; 50 single characters are too short to be a copy
CHUNK = 1 << 19  # ids that are hashed at a time
MAX_THREADS = 4

BASE = 0x9E3779B97F4A7C15  # odd, so that no power of it is 0 modulo 2^64


def measure_overlap(train: np.ndarray, val: np.ndarray, n_ids: int, bytes_per_token: float) -> dict[str, Any]:
    """Compares token ids (N,) of the training part and of the validation part, both below `n_ids`.

    A validation token counts if it lies in a passage of PASSAGE_TOKENS tokens, or more if these are fewer than
    PASSAGE_BYTES bytes, that occurs in the training part. The result is exact, apart from collisions of 64-bit hashes.
    It takes about 40 bytes of memory for each token of the validation part.

    Returns:
        "tokens" that count, their "share" of the validation part, and the "passage_tokens" of a passage.
    """
    length = max(PASSAGE_TOKENS, round(PASSAGE_BYTES / max(bytes_per_token, 1)))
    tokens = int(cover(occurring(train, val, length, n_ids), length).sum())
    return {"tokens": tokens, "share": tokens / max(len(val), 1), "passage_tokens": length}


def occurring(train: np.ndarray, val: np.ndarray, length: int, n_ids: int) -> np.ndarray:
    """Whether each passage of `length` ids of the validation part occurs in training: boolean (N - length + 1,)."""
    in_val = passage_hashes(val, length, n_ids)
    passages = distinct(in_val)  # (M,)
    occurs = np.zeros(len(passages), dtype=bool)

    def find(start: int) -> None:
        hashes = np.sort(passage_hashes(train[start : start + CHUNK + length - 1], length, n_ids))
        occurs[contains(hashes, passages)] = True

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS)) as pool:
        for _ in pool.map(find, range(0, len(train) if len(passages) else 0, CHUNK)):  # threads write the same value
            pass
    return contains(passages[occurs], in_val)


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
