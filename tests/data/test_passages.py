"""Hashes of passages against Python's integers, and sets of hashes against Python's sets."""

import numpy as np
import pytest

from tril.data import passages
from tril.data.passages import BASE, HashSet, cover, distinct, id_hashes, passage_hashes


@pytest.mark.parametrize(("n", "length"), [(5, 6), (6, 6), (40, 1), (100, 7), (100, 50)])
def test_hashes_are_the_polynomial(n, length, monkeypatch):
    monkeypatch.setattr(passages, "CHUNK", 16)  # several chunks
    passages._powers.cache_clear()
    ids = np.random.default_rng(n).integers(0, 300, n).astype(np.uint16)
    values = [int(id_hashes(300)[i]) for i in ids]
    expected = [
        sum(value * BASE**k for k, value in enumerate(values[start : start + length])) % 2**64
        for start in range(n - length + 1)
    ]
    np.testing.assert_array_equal(passage_hashes(ids, length, 300), np.array(expected, np.uint64))
    passages._powers.cache_clear()


def test_ids_have_different_hashes():
    hashes = id_hashes(1 << 16)
    assert len(set(hashes.tolist())) == 1 << 16
    shares = [(hashes >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
    np.testing.assert_allclose(shares, 0.5, atol=5 * 0.5 / 256)  # five standard deviations


def test_a_set_of_hashes_is_pythons_set():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, 5000, dtype=np.uint64)
    members, others = values[:2000], values[2000:]
    hashes = HashSet(distinct(np.concatenate([members, members[:100]])))
    assert hashes.hashes.tolist() == sorted(set(members.tolist()))
    queries = rng.permutation(np.concatenate([members[:500], others, np.array([0, 2**64 - 1], np.uint64)]))
    expected = [value in set(members.tolist()) for value in queries.tolist()]
    assert hashes.contains(queries).tolist() == expected
    found = hashes.hashes[hashes.find(queries)]
    assert sorted(found.tolist()) == sorted(members[:500].tolist())
    assert not HashSet(members[:0]).contains(queries).any()


def test_covered_positions():
    starts = np.array([0, 1, 0, 0, 0, 1, 1, 0], dtype=bool)
    assert cover(starts, 3).astype(int).tolist() == [0, 1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert cover(starts[:0], 3).tolist() == []
