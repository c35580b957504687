"""Tables in Markdown that can also be read as they are."""

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], words: Collection[int]) -> str:
    """The first of the lines is the heading. words: the columns that are aligned to the left; the others are numbers."""
    widths = [max(3, *map(len, column)) for column in zip(*lines)]
    rule = "|".join("-" * (width + 2) if i in words else "-" * (width + 1) + ":" for i, width in enumerate(widths))
    shown = [
        " | ".join(
            cell.ljust(width) if i in words else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in lines
    ]
    return "\n".join([f"| {shown[0]} |", f"|{rule}|", *(f"| {line} |" for line in shown[1:])])
