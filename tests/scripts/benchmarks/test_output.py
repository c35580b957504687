"""What the benchmark writes: the table of literal rows, JSON with all digits, a picture with one panel per plot."""

import json

import pytest

from tril.scripts.benchmarks import output
from tril.scripts.benchmarks.section import Plot, Section

ABOUT = {
    "device": "A chip (cpu)",
    "precision": "32-true",
    "torch": "2.0",
    "date": "2030-01-02 03:04",
    "load before the start": None,
}
ROWS = [
    {"program": "tril", "ms per step": 12.3456, "tokens/s": 61234.5, "ratio": None, "steps": 1000},
    {"program": "a|b", "ms per step": 0.00123456, "tokens/s": 999.96, "ratio": 1.5, "steps": 3},
]
TABLE = r"""
| program | ms per step | tokens/s | ratio | steps |
|---------|------------:|---------:|------:|------:|
| tril    |       12.35 |   61,234 |     - | 1,000 |
| a\|b    |    0.001235 |    1,000 | 1.500 |     3 |
""".strip()  # fmt: skip
PLOT = Plot({"a": {1: 3.0, 2: 4.0}}, "x", "y")


def section(**changes):
    values = {
        "name": "train",
        "title": "Speed",
        "rows": ROWS,
        "samples": {"a": [0.1, 1 / 3]},
        "notes": ["One.", "Two."],
    }
    return Section(**values | changes)


def test_the_table_of_literal_rows():
    assert output.table(ROWS) == TABLE
    with pytest.raises(AssertionError, match="different keys"):
        output.table([{"a": 1}, {"b": 1}])


@pytest.mark.parametrize(
    "value, text", [(0.0, "0"), (float("nan"), "nan"), (-1234.56, "-1,235"), (9.99996, "10.00"), (1e-7, "0.0000001000")]
)
def test_shown(value, text):
    assert output.shown(value) == text


def test_a_section_is_heading_table_and_notes():
    assert output.text(section()) == f"## Speed\n\n{TABLE}\n\n- One.\n- Two."
    assert output.text(section(notes=())) == f"## Speed\n\n{TABLE}"


def test_json_keeps_every_digit_and_markdown_starts_with_the_machine(tmp_path):
    output.write(tmp_path, ABOUT, {"steps": 3}, [section(plot=PLOT)])
    read = json.loads((tmp_path / "bench.json").read_text())
    assert read["machine"] == ABOUT and read["settings"] == {"steps": 3}
    (part,) = read["sections"]
    assert part == {name: value for name, value in vars(section()).items() if name != "plot"}
    text = (tmp_path / "bench.md").read_text()
    assert text.startswith("# Benchmark\n\n- device: A chip (cpu)\n") and TABLE in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "bench.md"]


def test_the_picture_has_a_panel_for_every_plot(tmp_path, monkeypatch):
    drawn = []
    draw = Plot.draw
    monkeypatch.setattr(Plot, "draw", lambda plot, axes, title: drawn.append((axes, title)) or draw(plot, axes, title))
    path = tmp_path / "bench.png"
    assert not output.plot(path, ABOUT, [section()]) and not path.exists()
    sections = [section(plot=PLOT, title=title) for title in ("One", "Two", "Three")]
    assert output.plot(path, ABOUT, [sections[0], section(), *sections[1:]])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [title for _, title in drawn] == ["One", "Two", "Three"]
    assert len({id(axes) for axes, _ in drawn}) == 3 and len(drawn[0][0].figure.axes) == 3  # no empty fourth panel
