"""How much of the validation part also occurs in the training part.

A validation token counts if it lies in a passage of `length` tokens that occurs in the training part. The result is
exact, apart from collisions of 64-bit hashes: in total fewer than one in 10^4 expected for 10^7 validation and 10^8
training tokens. Memory depends on the validation part alone, and is bounded by BLOCK.

Letters: M distinct passages of a block of the validation part.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from tril.data.passages import HashSet, cover, distinct, passage_hashes

PASSAGE_TOKENS = 50
MAX_SHARE = 0.01  # more than this is refused or warned of
PASSAGE_BYTES = 150  # 50 tokens of BPE; 50 single characters are too short to be a copy
BLOCK = 1 << 23  # validation tokens that are compared with the training part at a time
CHUNK = 1 << 19  # training tokens that a thread reads at a time
MAX_THREADS = 4


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

    def __str__(self) -> str:
        where = f"passages of {self.passage_tokens} tokens that also occur in the training part"
        return f"{100 * self.share:.2f} % of the validation tokens lie in {where}"


def passage_length(bytes_per_token: float) -> int:
    """PASSAGE_TOKENS, or more if these are fewer than PASSAGE_BYTES bytes, as with a character tokenizer."""
    return max(PASSAGE_TOKENS, round(PASSAGE_BYTES / max(bytes_per_token, 1)))


def measure_overlap(train: np.ndarray, val: np.ndarray, n_ids: int, length: int = PASSAGE_TOKENS) -> Overlap:
    """Compares token ids (N,) of the training part and of the validation part, both below `n_ids`."""
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
    positions = passage_hashes(val, length, n_ids)  # (N - length + 1,)
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
