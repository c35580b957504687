"""Tables and numbers as text, compared with literals."""

import pytest

from tril.scripts.cli.formats import clock, engineering, markdown_table, plain_table, plural

LINES = [["a", "b", "c"], ["x", "1", "long word"], ["yy", "2000", "z"]]


def test_markdown_table_is_aligned():
    assert markdown_table(LINES, text_columns=(0, 2)).splitlines() == [
        "| a   |    b | c         |",
        "|-----|-----:|-----------|",
        "| x   |    1 | long word |",
        "| yy  | 2000 | z         |",
    ]
    assert markdown_table([["a", "b"], ["x", "1"]]) == "| a   |   b |\n|-----|----:|\n| x   |   1 |"


def test_plain_table_is_aligned():
    assert plain_table(LINES, text_columns=(0, 2)).splitlines() == ["a      b  c", "x      1  long word", "yy  2000  z"]


def test_lines_of_different_length_are_an_error():
    with pytest.raises(ValueError):
        markdown_table([["a", "b"], ["x"]])


def test_durations_and_counts():
    assert [clock(seconds) for seconds in (0, 3725.9, 86399, 129600)] == [
        "00:00:00",
        "01:02:05",
        "23:59:59",
        "1.5 days",
    ]
    values = (331_776, 1_536_000, 10_616_832, 8.5e7, 3e9, 2.5e12, 12)
    assert [engineering(value) for value in values] == ["332 k", "1.54 M", "10.6 M", "85 M", "3 G", "2.5 T", "12"]
    assert (plural(1, "run"), plural(2, "run")) == ("1 run", "2 runs")
