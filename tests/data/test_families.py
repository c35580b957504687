"""Families of copies and near-copies, against exact shares of passages."""

import random

import pytest

from tril.data import families as module
from tril.data.families import LONG_PASSAGE, PASSAGE, SKETCH_SIZE, Sketch, copied_shares, families, shared

WORDS = [f"{a}{b}{c}" for a in ("ka", "lo", "mi", "su") for b in ("ren", "tal", "vo", "x") for c in ("da", "e", "um")]


def text(seed, n_words):
    return " ".join(random.Random(seed).choices(WORDS, k=n_words)).encode()


def exact_share(one, other):
    """Share of the distinct passages of the smaller text that occur in the other."""
    a, b = ({each[i : i + PASSAGE] for i in range(len(each) - PASSAGE + 1)} for each in (one, other))
    return len(a & b) / min(len(a), len(b))


@pytest.mark.parametrize("n_words", [20, 2000])
@pytest.mark.parametrize("kept", [0.0, 0.2, 0.5, 0.8])
def test_the_estimated_share_is_near_the_exact_one(n_words, kept):
    original, other = text(1, n_words), text(2, 2 * n_words)
    changed = original[: int(kept * len(original))] + other
    estimate, exact = shared(Sketch([original]), Sketch([changed])), exact_share(original, changed)
    assert abs(estimate - exact) <= (1e-9 if n_words == 20 else 4 * 0.5 / SKETCH_SIZE**0.5)
    assert shared(Sketch([changed]), Sketch([original])) == estimate


def test_a_sketch_does_not_depend_on_the_chunks():
    whole = text(1, 3000)
    one, other = Sketch([whole]), Sketch([whole[:10], whole[10:20], whole[20:5000], b"", whole[5000:]])
    assert one.hashes.tolist() == other.hashes.tolist() and len(one.hashes) == SKETCH_SIZE
    short = text(1, 60)  # all of its passages are kept
    pieces = Sketch([short[i : i + 40] for i in range(0, len(short), 40)])
    assert pieces.hashes.tolist() == Sketch([short]).hashes.tolist() and len(pieces.hashes) < SKETCH_SIZE
    assert one.hashes.base is None  # a view would keep the hashes of the whole document
    assert (one.content, one.size) == (other.content, len(whole)) == (other.content, other.size)


def test_copies_and_near_copies_are_families():
    a, b, c = (text(seed, 400) for seed in "abc")
    documents = [
        a,  # 0
        b,  # 1
        a + b" and one sentence more at the end of this copy",  # 2: nearly a
        c,  # 3
        b,  # 4: a copy of b
        b"short",  # 5
        text("d", 400),  # 6
        c[: len(c) // 3],  # 7: a part of c
        b"short",  # 8: a copy of a text without a passage
        b"Short",  # 9
        a[:100] + text("e", 400),  # 10: shares a passage with a, but little of it
    ]
    sketches = [Sketch([document]) for document in documents]
    assert families(sketches) == [0, 1, 0, 3, 1, 5, 6, 3, 5, 9, 10]
    exact = [Sketch([document], near=False) for document in documents]
    assert families(exact, near=False) == [0, 1, 2, 3, 1, 5, 6, 7, 5, 9, 10]
    assert families([]) == []


def test_a_chain_of_versions_is_one_family():
    """Each version drops the oldest third and adds a new one; the first and the last share nothing."""
    parts = [text(seed, 150) for seed in range(8)]
    versions = [b"\n".join(parts[i : i + 3]) for i in range(6)]
    assert exact_share(versions[0], versions[-1]) == 0
    assert families([Sketch([version]) for version in versions]) == [0] * 6


def test_documents_that_share_a_header_stay_apart():
    documents = [text("header", 20) + text(seed, 200) for seed in range(300)]
    assert families([Sketch([document]) for document in documents]) == list(range(300))


def test_time_is_bounded_if_all_documents_are_alike(monkeypatch):
    compared = []
    monkeypatch.setattr(module, "shared", lambda one, other: compared.append(1) or 0.0)
    documents = [text("prompt", 100) + text(seed, 20) for seed in range(200)]
    families([Sketch([document]) for document in documents])
    assert len(compared) <= 200 * module.MAX_CANDIDATES


def test_copied_shares_are_near_the_exact_ones():
    a, b, passage = text("a", 2000), text("b", 1000), text("p", 100)
    documents = [a + passage + a[:0], b + b" " + passage, text("c", 500), b"tiny", b"", a[:140] + text("d", 100)]
    exact = [len(passage) / len(documents[0]), (len(passage) + 1) / len(documents[1]), 0, 0, 0, 0]
    for share, expected, document in zip(copied_shares(documents), exact, documents, strict=True):
        assert abs(share - expected) <= 30 / max(len(document), 1)
    assert copied_shares([a, a[: LONG_PASSAGE - 1]]) == [0, 0]
    assert copied_shares([]) == []
