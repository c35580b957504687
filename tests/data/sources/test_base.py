"""Pieces of a text, the split by a hash, and the hash of files."""

import hashlib
import tracemalloc

from tril.data.sources import base
from tril.data.sources.base import Piece, cut, digest_files, in_split


def test_cut_keeps_every_character_and_ends_at_lines(monkeypatch):
    monkeypatch.setattr(base, "PIECE_SIZE", 5)
    assert list(cut("ab\ncd\nefghijkl\n")) == [
        Piece("ab\n", False), Piece("cd\n", False), Piece("efghi", False), Piece("jkl\n", True)
    ]  # fmt: skip
    assert list(cut("", True)) == []
    assert list(cut("abcde", False)) == [Piece("abcde", False)]


def test_hash_split_is_fixed_and_has_the_right_share():
    share = int.from_bytes(hashlib.sha256(b"abc.py").digest()[:8], "big") / 2**64
    assert in_split("abc.py", "val", share + 1e-9) and not in_split("abc.py", "val", share - 1e-9)
    val = [str(i) for i in range(20_000) if in_split(str(i), "val", 0.05)]
    assert abs(len(val) - 1000) < 5 * 31  # five standard deviations of a binomial
    assert not any(in_split(key, "train", 0.05) for key in val)


def test_a_file_is_hashed_in_chunks(tmp_path):
    (tmp_path / "text.txt").write_bytes(bytes(20_000_000))
    tracemalloc.start()
    try:
        digest = digest_files([("text.txt", tmp_path / "text.txt")])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    content = hashlib.sha256(bytes(20_000_000)).hexdigest()
    assert digest == hashlib.sha256(f"text.txt\0{content}\0".encode()).hexdigest()
