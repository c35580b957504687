"""The overlap of validation with training, against a search with Python's sets."""

import numpy as np
import pytest

from tril.data import overlap as module
from tril.data.overlap import measure_overlap


def searched(train, val, length):
    """The number of covered validation tokens."""
    passages = {tuple(train[i : i + length]) for i in range(len(train) - length + 1)}
    covered = set()
    for i in range(len(val) - length + 1):
        if tuple(val[i : i + length]) in passages:
            covered |= set(range(i, i + length))
    return len(covered)


@pytest.mark.parametrize("length", [2, 5, 50])
def test_overlap_is_what_a_search_finds(length, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 128)
    monkeypatch.setattr(module, "PASSAGE_TOKENS", length)
    monkeypatch.setattr(module, "PASSAGE_BYTES", 0)
    rng = np.random.default_rng(length)
    train, val = (rng.integers(0, 40, n).astype(np.uint16) for n in (2000, 600))
    val[130:190] = train[1000:1060]  # across the ends of chunks
    val[200:249] = train[126:175]
    val[300:420] = 7
    train[50:102] = 7
    val[-50:] = train[:50]
    found = measure_overlap(train, val, 40, 3.0)
    tokens = searched(train.tolist(), val.tolist(), length)
    assert 60 <= tokens == found["tokens"] and found["share"] == tokens / 600
    assert found["passage_tokens"] == length


def test_texts_shorter_than_a_passage_have_none():
    tokens = np.arange(49, dtype=np.uint16)
    for train, val in ((tokens, tokens), (np.tile(tokens, 3), tokens), (tokens, np.tile(tokens, 3)), (tokens[:0],) * 2):
        assert measure_overlap(train, val, 49, 3.0) == {"tokens": 0, "share": 0.0, "passage_tokens": 50}
