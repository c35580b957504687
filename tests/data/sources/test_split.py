"""Which documents are for validation, and where one text is cut."""

import random

import pytest

from tril.data.families import Sketch
from tril.data.sources.split import choose_clean_val, choose_val, split_point


def sketches(sizes):
    """Documents without common passages."""
    return [Sketch([random.Random(i).randbytes(size)]) for i, size in enumerate(sizes)]


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_the_share_is_within_a_factor_of_one_and_a_half(fraction, seed):
    sizes = [int(random.Random(seed).lognormvariate(6, 1.5)) + 1 for _ in range(300)]
    names = [f"{seed}/{i}.txt" for i in range(300)]
    val = choose_val(names, sketches(sizes), fraction, near=False)
    assert val is not None
    share = sum(size for name, size in zip(names, sizes, strict=True) if name in val) / sum(sizes)
    assert fraction / 1.5 <= share <= fraction * 1.5


def test_no_choice_if_documents_are_too_few_or_too_large():
    assert choose_val(["a", "b"], sketches([100, 100]), 0.05) is None
    assert choose_val(["a"], sketches([100]), 0.5) is None
    assert choose_val(["a", "b", "c"], sketches([1000, 1000, 10]), 0.05) is None
    assert choose_val(["a", "b", "c"], sketches([1000, 1000, 80]), 0.05) == {"c"}
    assert choose_val([], [], 0.05) is None
    for salt in range(10):  # 50 of 1000 bytes are wanted: not 95, whichever comes first
        names = [f"{salt}/{i}" for i in range(11)]
        assert choose_val(names, sketches([95] * 10 + [50]), 0.05) == {f"{salt}/10"}


def test_families_are_chosen_as_a_whole():
    copies = [Sketch([random.Random(i % 50).randbytes(200)]) for i in range(200)]
    names = [str(i) for i in range(200)]
    val = choose_val(names, copies, 0.1)
    assert val is not None and len(val) == 20
    assert all((str(i) in val) == (str(i % 50) in val) for i in range(200))


def test_clean_validation_has_no_copied_document():
    blocks = {f"{i:02d}": random.Random(i).randbytes(1000) for i in range(60)}
    blocks |= {f"copy {i:02d}": blocks[f"{i:02d}"][:200] + random.Random(-i).randbytes(800) for i in range(1, 20)}
    blocks |= {"twin 1": b"equal", "twin 2": b"equal", "large": random.Random("large").randbytes(5000)}
    for salt in map(str, range(20)):
        val = choose_clean_val(blocks, 0.1, salt)
        assert val <= {f"{i:02d}" for i in range(20, 60)} | {"00"}
        assert abs(sum(len(blocks[name]) for name in val) / sum(map(len, blocks.values())) - 0.1) < 0.006
    assert len({choose_clean_val(blocks, 0.1, str(salt)) for salt in range(20)}) == 20


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (b"\nfirst", 1),  # the wanted position is a line start
        (b"end\nnext line", 4),
        (b"d two words\nline", 12),
        (b"d two words", 1),  # the white space belongs to the validation part
        (b" two words", 4),
        ("é漢字".encode()[1:], 1),  # the second byte of é, then 漢
        ("漢字".encode()[1:], 2),
        (b"abc", 1),
        (b"a", 1),
        (b"last line\n", 4),
        (b"", 0),
    ],
)
def test_where_a_text_is_cut(window, expected):
    assert split_point(window) == expected
