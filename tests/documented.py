"""The commands and the Python examples in README.md and docs/*.md, as a reader types them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPUTED = "attention.md"  # its examples are tested with their output
EDITED = "add_your_own.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python|tril \w+|pip) (?:(?!\.\.\.)[^`\n])*)`")  # `tril heads` is a name
TRIL = r"(?:python (?:scripts/|(?=train\.py))|tril )(\w+)"
PROGRAM = re.compile(rf"(?:[A-Z_]+=\S+ )*((?:{TRIL}|(?:python|pip|pytest|torchrun) ).*)")


class Command(NamedTuple):
    """A command: its text, the words that the shell passes on, and "train" or the name of a script of Tril, or ""."""

    page: str
    text: str
    words: list[str]
    script: str


def blocks(page: Path, *languages: str) -> list[str]:
    """The contents of the fenced blocks in one of the languages."""
    return [content for language, content in FENCE.findall(page.read_text("utf-8")) if language in languages]


def commands(page: Path) -> list[Command]:
    """The commands of a page, in blocks without a language or of bash, and within lines."""
    text = "\n".join([*blocks(page, "", "bash"), *INLINE.findall(FENCE.sub("", page.read_text("utf-8")))])
    lines = [part for line in re.sub(r" *\\\n *", " ", text).splitlines() for part in line.split(" && ")]
    found = [match for line in lines if (match := PROGRAM.match(line)) and "/NAME.py" not in line]
    return [Command(page.name, m[1], shlex.split(m[1], comments=True), m[2] or "") for m in found]
