"""docs/attention.md is current, and the tests that it names exist."""

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "attention.md"
TOLERANCE = 1.5e-4  # another CPU may round the last of four digits differently
DECIMAL = re.compile(r"-?\d+\.\d+")
TEST_NAME = re.compile(r"`([\w/]+\.py)::(\w+)`")
REBUILD = "run `cog -P -r docs/attention.md`"


def assert_same_page(written: str, built: str) -> None:
    """Equal text, and decimal numbers within TOLERANCE."""
    for row, (old, new) in enumerate(zip(written.splitlines(), built.splitlines(), strict=False), 1):
        assert DECIMAL.sub("#", old) == DECIMAL.sub("#", new), f"line {row} of {PAGE.name} is out of date; {REBUILD}"
        for x, y in zip(DECIMAL.findall(old), DECIMAL.findall(new), strict=True):
            assert abs(float(x) - float(y)) <= TOLERANCE, f"line {row} of {PAGE.name}: {x}, now {y}; {REBUILD}"
    assert len(written.splitlines()) == len(built.splitlines()), f"{PAGE.name} has another length; {REBUILD}"


def functions_of(path: Path) -> set[str]:
    """Names of all test functions; a parametrized one has a single name here."""
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if _is_test(node)}


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test_")


def test_the_page_is_current(tmp_path, capsys):
    from cogapp import Cog

    built = tmp_path / "attention.md"
    status = Cog().main(["cog", "-P", "-o", str(built), str(PAGE)])
    torch.set_printoptions(profile="default")  # the page sets them
    assert status == 0, capsys.readouterr()
    assert_same_page(PAGE.read_text(encoding="utf-8"), built.read_text(encoding="utf-8"))


def test_every_test_that_the_page_names_exists():
    named = TEST_NAME.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) >= 96
    for file, function in sorted(set(named)):
        folder = ROOT / "tests" / "model"
        assert (folder / file).is_file(), f"{PAGE.name} names {file}, which is not in {folder.name}"
        assert function in functions_of(folder / file), f"{PAGE.name} names {file}::{function}, which does not exist"


def test_every_row_of_the_last_section_names_a_test():
    tables = PAGE.read_text(encoding="utf-8").split("\n## 8. ")[-1]
    rows = [row for row in tables.splitlines() if row.startswith("| ") and not re.search(r"\| test \|$", row)]
    assert len(rows) >= 96
    for row in rows:
        assert re.search(r"\| `[\w/]+\.py::\w+` \|$", row), row


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
