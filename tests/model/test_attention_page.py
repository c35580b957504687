"""docs/attention.md is current."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "attention.md"
TOLERANCE = 1.5e-4  # another CPU may round the last of four digits differently
DECIMAL = re.compile(r"-?\d+\.\d+")
REBUILD = "run `cog -P -r docs/attention.md`"


def assert_same_page(written: str, built: str) -> None:
    """Equal text, and decimal numbers within TOLERANCE."""
    for row, (old, new) in enumerate(zip(written.splitlines(), built.splitlines(), strict=False), 1):
        assert DECIMAL.sub("#", old) == DECIMAL.sub("#", new), f"line {row} of {PAGE.name} is out of date; {REBUILD}"
        for x, y in zip(DECIMAL.findall(old), DECIMAL.findall(new), strict=True):
            assert abs(float(x) - float(y)) <= TOLERANCE, f"line {row} of {PAGE.name}: {x}, now {y}; {REBUILD}"
    assert len(written.splitlines()) == len(built.splitlines()), f"{PAGE.name} has another length; {REBUILD}"


def test_the_page_is_current(tmp_path, capsys):
    from cogapp import Cog

    built = tmp_path / "attention.md"
    status = Cog().main(["cog", "-P", "-o", str(built), str(PAGE)])
    torch.set_printoptions(profile="default")  # the page sets them
    assert status == 0, capsys.readouterr()
    assert_same_page(PAGE.read_text(encoding="utf-8"), built.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "written, built",
    [
        ("line 97: 0.1184", "line 98: 0.1184"),
        ("0.1184 0.3120", "0.1184 0.3123"),
        ("0.1184 0.3120", "0.1184"),
        ("one\ntwo", "one"),
        ("-0.1184", "0.1184"),
    ],
)
def test_a_page_that_differs_is_found(written, built):
    with pytest.raises(AssertionError, match="cog -P -r"):
        assert_same_page(written, built)


def test_a_digit_that_another_cpu_rounds_is_accepted():
    assert_same_page("a 0.1184 b\nc", "a 0.1185 b\nc")
