"""docs/attention.md is current: its examples print what stands below them, and the code that it quotes exists."""

import contextlib
import io
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
TOLERANCE = 1.5e-4  # another CPU may round the last of four digits differently
DECIMAL = re.compile(r"-?\d+\.\d+")
EXAMPLE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"^(?:\|[^|\n]+){3}\| `([^`]+)` \|$", re.MULTILINE)  # the fourth column of a table, "code"


def assert_same_text(written: str, printed: str) -> None:
    """Equal text, and decimal numbers within TOLERANCE."""
    assert DECIMAL.sub("#", written) == DECIMAL.sub("#", printed)
    for old, new in zip(DECIMAL.findall(written), DECIMAL.findall(printed), strict=True):
        assert abs(float(old) - float(new)) <= TOLERANCE, f"{old} in attention.md, now {new}"


def test_each_example_prints_the_text_below_it():
    names: dict[str, object] = {}
    torch.manual_seed(0)
    try:
        for code, written in EXAMPLE.findall(PAGE):
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, names)
            assert_same_text(written, output.getvalue())
    finally:
        torch.set_printoptions(profile="default")  # the page sets them


def test_the_quoted_code_exists():
    code = (ROOT / "model" / "attention.py").read_text(encoding="utf-8")
    steps = QUOTED.findall(PAGE)
    assert len(steps) == 12
    for step in steps:
        assert code.count(f"{step}\n") + code.count(f"{step}  #") == 1, step
