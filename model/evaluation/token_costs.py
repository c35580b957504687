"""The bits of each token of a text, and a page that shows them as the color of its tokens."""

import html
import math
from typing import Any

import numpy as np

from tril.model.evaluation.scored_text import ScoredText
from tril.model.formats import plain_table, plural
from tril.model.generation.language_model import LanguageModel

HOTTEST = 16.0  # bits of the strongest color; a token of 16 bits has a probability of 1/65,536
MARKS = {"\n": "\u21b5\n", "\t": "\u2192\t", "": "\u25e6"}
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ max-width: 60rem; margin: auto; padding: 1rem; font-family: system-ui, sans-serif; }}
pre {{ line-height: 1.8; white-space: pre-wrap; overflow-wrap: anywhere; }}
span {{ background: color-mix(in srgb, #e8590c var(--heat), transparent); border-right: 1px solid Canvas; unicode-bidi: isolate; }}
</style>
<h1>{title}</h1>
<p>{summary}</p>
<p>The color goes from 0 to {hottest:g} bits; point at a token to see its bits. \u21b5 newline, \u2192 tab, \u25e6 a token that ends a character of several tokens.</p>
<pre>{tokens}</pre>
</html>
"""  # noqa: E501


def token_costs(lm: LanguageModel, text: str, name: object) -> tuple[dict[str, Any], str, str]:
    """The bits of each token after an end-of-text token, with the windows of `ScoredText`; their sum, and per byte.

    A character of several tokens stands with the first of them, and the others have the text "".

    Args:
        name: of the model.

    Returns:
        The figures, a table of them, and the page.

    Raises:
        ValueError: the text has characters that the tokenizer does not know.
    """
    tokens = np.array([lm.eot_id, *lm.encode(text)])
    ends = [end for _, end in lm.tokenizer.encode(text, add_special_tokens=False).offsets]  # in characters
    ends = np.maximum.accumulate([*ends[:-1], len(text)])
    size = len(text.encode())
    bits = ScoredText.of(lm, tokens, size).nll.astype(float) / math.log(2)
    pieces = [text[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    rows = [{"text": piece, "bits": cost} for piece, cost in zip(pieces, bits.tolist(), strict=True)]
    report = {"bits": bits.sum(), "bytes": size, "bits_per_byte": bits.sum() / size, "tokens": rows}
    sizes = f"{plural(size, 'byte')} and {plural(len(rows), 'token')}"
    summary = f"{bits.sum():,.1f} bits for {sizes}: {report['bits_per_byte']:.4f} bits per byte"
    lines = [["bits", "token"], *([f"{row['bits']:.2f}", repr(row["text"])] for row in rows)]
    text = f"{plain_table(lines, text_columns=(1,))}\n\n{summary}"
    return report, text, token_page(rows, f"Bits by {name}", summary)


def token_page(rows: list[dict[str, Any]], title: str, summary: str) -> str:
    """HTML without scripts; the rows are the tokens of `token_costs`, and all texts may contain any characters."""
    spans = []
    for row in rows:
        heat = 0.8 * min(row["bits"], HOTTEST) / HOTTEST
        chars = [MARKS.get(char) or (char if char.isprintable() else ascii(char)[1:-1]) for char in row["text"] or [""]]
        shown = html.escape("".join(chars))
        spans.append(f'<span style="--heat:{heat:.0%}" title="{row["bits"]:.2f} bits">{shown}</span>')
    texts = {"title": html.escape(title), "summary": html.escape(summary)}
    return PAGE.format(**texts, hottest=HOTTEST, tokens="".join(spans))
