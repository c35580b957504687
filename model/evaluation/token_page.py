"""The cost in bits of every token of a text as one HTML page: a heat map that needs no script."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tril.model.atomic_files import write_text
from tril.model.evaluation.subject import EvaluatedText, Subject

BITS_PER_LEVEL = 2  # of the color scale
N_LEVELS = 9  # the last one is open
EMPTY = "\u25e6"  # shown for a token without text of its own
MARKS = {"\n": "\u21b5\n", "\t": "\u2192\t"}


class TokenCost(NamedTuple):
    """A token: its part of the text, and its bits."""

    text: str
    bits: float

    @property
    def level(self) -> int:
        """The step of the color scale."""
        last = N_LEVELS - 1
        return int(self.bits / BITS_PER_LEVEL) if self.bits < last * BITS_PER_LEVEL else last  # also of NaN

    @property
    def shown(self) -> str:
        """The text with visible line ends, tabs and control characters."""
        shown = (MARKS.get(char) or (char if char.isprintable() else ascii(char)[1:-1]) for char in self.text)
        return "".join(shown) or EMPTY


def token_costs(subject: Subject, text: str, stride: int | None) -> list[TokenCost]:
    """The bits of each token of a text after an end-of-text token; `stride` as in `ScoredText.of`.

    Raises:
        ValueError: the text has characters that the tokenizer does not know.
    """
    lm = subject.lm
    tokens = np.array([lm.eot_id, *lm.encode(text)])
    ends = [end for _, end in lm.tokenizer.encode(text, add_special_tokens=False).offsets]
    bits = subject.score(EvaluatedText(tokens, "", len(text.encode())), stride=stride).nll.astype(float) / math.log(2)
    return [TokenCost(*cost) for cost in zip(pieces(text, ends), bits.tolist(), strict=True)]


def pieces(text: str, ends: Sequence[int]) -> Iterator[str]:
    """Cuts the text at the ends of its tokens.

    A character of several tokens belongs to the first of them, and the others get "".

    Args:
        ends: of each token in characters, as the tokenizer reports them.
    """
    start = 0
    for number, end in enumerate(ends, 1):
        end = len(text) if number == len(ends) else max(start, end)
        yield text[start:end]
        start = end


def write_token_page(path: str | Path, costs: Sequence[TokenCost], title: str, summary: str) -> None:
    """Writes the page; text, title and summary may contain any characters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    steps = [BITS_PER_LEVEL * i for i in range(N_LEVELS)]
    levels = [*(f"{low}\u2013{low + BITS_PER_LEVEL}" for low in steps[:-1]), f"{steps[-1]}+"]
    values = {"costs": costs, "title": title, "summary": summary, "levels": levels}
    write_text(path, environment.get_template("token_page.html").render(**values))
