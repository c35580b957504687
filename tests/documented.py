"""The commands and the Python examples in README.md and docs/*.md, as a reader types them."""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMPUTED = "attention.md"  # its examples are tested with their output: tests/model/test_attention_page.py
EDITED = "add_your_own.md"  # its commands need the class that it adds: tests/test_add_your_own.py
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python (?:train\.py|scripts/[a-z_]+\.py)|tril [a-z_]+)(?: (?:(?!\.\.\.)[^`\n])*)?)`")
PROGRAM = re.compile(r"^(?:python|tril|pip|pytest|torchrun) ", re.MULTILINE)  # other blocks are output or drawings
VARIABLE = re.compile(r"^([A-Z_]+)=(\S.*)$")
ENVIRONMENT = re.compile(r"[A-Z_]+=\S*$")
QUOTED = re.compile(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.")


class Command(NamedTuple):
    """A command of a page: its text, and the words that the shell passes on, without variables set for it."""

    page: str
    text: str
    words: tuple[str, ...]

    @property
    def script(self) -> str:
        """ "train", or the name of a script of Tril; "" for other programs."""
        name = self.words[1] if self.words[0] in ("python", "tril") else ""
        if name in ("train.py", "train"):
            return "train"
        return name if self.words[0] == "tril" else Path(name).stem if name.startswith("scripts/") else ""


def blocks(page: Path, languages: tuple[str, ...]) -> list[str]:
    """The contents of the fenced blocks in one of the languages."""
    return [content for language, content in FENCE.findall(page.read_text("utf-8")) if language in languages]


def commands(pages: Iterable[Path] = PAGES) -> list[Command]:
    """All commands of the pages."""
    found = []
    for page in pages:
        variables: dict[str, str] = {}  # a page is read in one shell
        for block in filter(PROGRAM.search, blocks(page, ("", "bash"))):
            found += _commands(page, block, variables)
        for line in INLINE.findall(FENCE.sub("", page.read_text("utf-8"))):
            found += _commands(page, line, {})
    return found


def _commands(page: Path, block: str, variables: dict[str, str]) -> list[Command]:
    found = []
    for line in re.sub(r" *\\\n\s*", " ", block).splitlines():
        comment = re.search(r"(?:^|\s)#", QUOTED.sub(lambda match: "x" * len(match[0]), line))
        text = line[: comment.start() if comment else None].strip()
        if set_variable := VARIABLE.match(text):
            variables[set_variable[1]] = "".join(shlex.split(set_variable[2]))
            continue
        for part in filter(None, re.split(r" && (?=(?:[^'\"]|'[^']*'|\"[^\"]*\")*$)", text)):
            plain = part
            for name, value in variables.items():
                plain = plain.replace(f"${name}", value)
            words = shlex.split(plain)
            while words and ENVIRONMENT.match(words[0]):
                words.pop(0)
            found.append(Command(page.relative_to(ROOT).as_posix(), part, tuple(words)))
    return found
