"""Renders the reports of this folder from their Jinja templates. One rule escapes every text of a format."""

import math
import re
from pathlib import Path

from tril.scripts.cli.formats import engineering, markdown_table, plural


def render(template: str, **values: object) -> str:
    """The text of a template; in an .html file every value is escaped, in Markdown by the filter `markdown`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"plural": plural}
    environment.tests |= {"finite": math.isfinite}
    environment.filters |= {"aligned": aligned, "engineering": engineering, "markdown": escape, "table": escaped_table}
    environment.filters |= {"printable": printable, "breakable": breakable}
    text = environment.get_template(template).render(**values).strip() + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)  # of nested blocks


def aligned(text: str) -> str:
    """A Markdown table without its rule, as one with a rule and aligned columns; its cells contain no `|`."""
    lines = filter(None, map(str.strip, text.splitlines()))
    return markdown_table([[cell.strip() for cell in line[1:-1].split("|")] for line in lines])


def escaped_table(table) -> str:
    """A `report_tables.Table` as Markdown."""
    return markdown_table([[escape(text) for text in line] for line in (table.header, *table.rows)], table.words)


def escape(text: str) -> str:
    """Text in one line without Markdown or HTML markup; an underscore within a word is not markup."""
    return re.sub(r"[\\`*|<>&\[\]~]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", printable(text))


def breakable(text: str):
    """HTML of a text that may break after the dots of a name such as trainer.max_steps, so that no word is cut."""
    from markupsafe import Markup, escape

    return Markup("<wbr>").join(escape(part) for part in re.split(r"(?<=\.)(?=[a-z])", text))  # noqa: S704


def printable(text: str) -> str:
    """Text in one line without control characters for a terminal."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
