"""The commands and the Python examples in README.md and docs/*.md, as a reader types them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPUTED = "attention.md"  # its examples are tested with their output: tests/model/test_attention_page.py
EDITED = "add_your_own.md"  # its commands need the class that it adds: tests/test_add_your_own.py
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python|tril|pip) (?:(?!\.\.\.)[^`\n])*)`")
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*((?:python|tril|pip|pytest|torchrun) .*)")


class Command(NamedTuple):
    """A command: its text, and the words that the shell passes on."""

    page: str
    text: str
    words: list[str]

    @property
    def script(self) -> str:
        """ "train", or the name of a script of Tril; "" for other programs."""
        found = re.match(r"(?:python (?:scripts/|(?=train\.py))|tril )(\w+)", self.text)
        return found[1] if found else ""


def blocks(page: Path, *languages: str) -> list[str]:
    """The contents of the fenced blocks in one of the languages."""
    return [content for language, content in FENCE.findall(page.read_text("utf-8")) if language in languages]


def commands(page: Path) -> list[Command]:
    """The commands of a page, in blocks without a language or of bash, and within lines."""
    text = "\n".join([*blocks(page, "", "bash"), *INLINE.findall(FENCE.sub("", page.read_text("utf-8")))])
    lines = [part for line in re.sub(r" *\\\n *", " ", text).splitlines() for part in line.split(" && ")]
    found = [match[1] for line in lines if (match := PROGRAM.match(line)) and "/NAME.py" not in line]
    return [Command(page.name, each, shlex.split(each, comments=True)) for each in found]
