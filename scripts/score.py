"""What each token of a text costs a model, in bits:  python scripts/score.py ckpt=latest text="def main():"

The sum is the size of the text as coded by the model. Prints a table; writes score.json and the page score.html.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, strict_settings
from tril.model.atomic_files import write_json
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import pick_device, user_errors, writable
from tril.scripts.cli.formats import plain_table, plural, read_utf8
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.evaluation.subject import Subject
    from tril.model.evaluation.token_page import TokenCost

TEXTS = ("ckpt", "text", "path", "out")
MAX_BYTES = 1 << 20  # the page has an element for each token
SHOWN = 200  # tokens that the printed table has at most; of a longer text, those of the most bits
MOST_EXPENSIVE = 20


@dataclass(frozen=True, config=strict_settings())
class ScoreConfig:
    """The keys of configs/score.yaml."""

    ckpt: str
    text: str | None
    path: str | None
    stride: Annotated[int, Field(ge=1)] | None
    device: str
    out: str | None

    @model_validator(mode="after")
    def _one_text(self):
        if (self.text is None) == (self.path is None):
            raise ValueError("text and path: exactly one of them must be set; use text=TEXT or path=FILE")
        return self

    def content(self) -> str:
        """The text.

        Raises:
            OSError: the file cannot be read.
            ValueError: the text is empty, too long or not UTF-8.
        """
        text = self.text if self.path is None else read_utf8("path", self.path, MAX_BYTES)
        if not text:
            name = "text" if self.path is None else f"path={self.path}"
            raise ValueError(f"{name} is empty; give at least one character")
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that is not UTF-8
            raise ValueError("text is not UTF-8; set the terminal to UTF-8") from error
        return text


@entry("score", TEXTS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        settings = build(ScoreConfig, cfg)
        text, checkpoint = settings.content(), find_checkpoint(settings.ckpt)
    # Importing torch takes a second, so wrong settings are reported before.
    from tril.model.evaluation.subject import Subject

    with user_errors():
        device = pick_device(settings.device)
        subject = Subject.of(checkpoint, device)
        subject.check_stride(settings.stride)
        costs = token_costs(subject, text, settings.stride)
        folder = writable(settings.out or run_folder(checkpoint) / "score", "out")
    write(folder, subject, text, costs, settings)


def token_costs(subject: "Subject", text: str, stride: int | None) -> "list[TokenCost]":
    """The bits of each token, after an end-of-text token.

    Raises:
        ValueError: the text has characters that the tokenizer does not know.
    """
    import numpy as np

    from tril.model.evaluation.subject import EvaluatedText
    from tril.model.evaluation.token_page import TokenCost, pieces

    lm = subject.lm
    tokens = np.array([lm.eot_id, *lm.encode(text)])
    ends = [end for _, end in lm.tokenizer.encode(text, add_special_tokens=False).offsets]
    scored = subject.score(EvaluatedText(tokens, "", len(text.encode())), stride=stride)
    bits = scored.nll.astype(float) / math.log(2)
    return [TokenCost(*cost) for cost in zip(pieces(text, ends), bits.tolist(), strict=True)]


def write(folder: Path, subject: "Subject", text: str, costs: "list[TokenCost]", settings: ScoreConfig) -> None:
    """Writes score.json and score.html, and prints the table."""
    from tril.model.evaluation.token_page import write_token_page

    total, size = sum(cost.bits for cost in costs), len(text.encode())
    summary = (
        f"{total:,.1f} bits for {plural(size, 'byte')} and {plural(len(costs), 'token')}: {total / size:.4f} bits per "
        f"byte, {total / len(costs):.4f} bits per token. Windows of {subject.length} tokens, "
        + ("not overlapping" if settings.stride is None else f"stride {settings.stride}")
        + "; the first token follows an end-of-text token."
    )
    rows = [{"token": i, "text": cost.text, "bits": cost.bits} for i, cost in enumerate(costs)]
    name = os.path.relpath(str(subject.checkpoint.path))
    windows = {"length": subject.length, "stride": settings.stride or subject.length}
    totals = {"bits": total, "bytes": size, "bits_per_byte": total / size}
    write_json(folder / "score.json", {"checkpoint": name, "windows": windows} | totals | {"tokens": rows})
    title = f"Bits of {settings.path or 'a text'} by {name}"
    write_token_page(folder / "score.html", costs, title, summary)
    if len(rows) > SHOWN:
        rows = sorted(rows, key=lambda row: -row["bits"])[:MOST_EXPENSIVE]
        print(f"The {len(rows)} tokens of the most bits; score.json has all.\n")
    lines = [[str(row["token"]), f"{row['bits']:.2f}", repr(row["text"])] for row in rows]
    table = plain_table([["token", "bits", "text"], *lines], text_columns=(2,))
    print(f"{table}\n\n{summary}\n{folder}: score.json, score.html", flush=True)


if __name__ == "__main__":
    main()
