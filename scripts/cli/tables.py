"""Tables: in Markdown with aligned columns, plain for the terminal, and as CSV."""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence


def markdown_table(lines: Sequence[Sequence[str]], text_columns: Collection[int] = (0,)) -> str:
    """A Markdown table whose source is aligned as well.

    Args:
        lines: the first one is the header.
        text_columns: columns that are aligned to the left; the others hold numbers.
    """
    widths = [max(3, width) for width in _widths(lines)]
    rule = "|".join("-" * (n + 2) if i in text_columns else "-" * (n + 1) + ":" for i, n in enumerate(widths))
    header, *rows = (f"| {' | '.join(_padded(line, widths, text_columns))} |" for line in lines)
    return "\n".join([header, f"|{rule}|", *rows])


def plain_table(lines: Sequence[Sequence[str]], text_columns: Collection[int] = (0,)) -> str:
    """A table for the terminal, columns separated by two spaces; see `markdown_table`."""
    widths = _widths(lines)
    return "\n".join("  ".join(_padded(line, widths, text_columns)).rstrip() for line in lines)


def csv_text(rows: Iterable[Mapping[str, object]]) -> str:
    """CSV with the columns of all rows in the order of their first appearance."""
    rows, text = list(rows), io.StringIO(newline="")
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _padded(line: Sequence[str], widths: Sequence[int], text_columns: Collection[int]) -> list[str]:
    return [
        text.ljust(width) if i in text_columns else text.rjust(width)
        for i, (text, width) in enumerate(zip(line, widths, strict=True))
    ]
