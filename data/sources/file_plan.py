"""How the documents of the user's files are split into a training and a validation part."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tril.data.families import Sketch
from tril.data.sources.base import content_key, printable
from tril.data.sources.file_formats import TEXT, damage_errors, open_file
from tril.data.sources.split import MAX_BYTES, MAX_DOCUMENTS, choose_val, split_point

SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for
CHUNK = 1 << 20  # bytes read at a time to compare documents


@dataclass(frozen=True)
class Plan:
    """How the documents are split.

    texts, rows: the rule for text files and for rows. "document": the names in `val`; "content": a hash of the content
        of each row; "position": the end of each document.
    n_documents: of those that were compared.
    """

    texts: Literal["document", "position"]
    rows: Literal["document", "position", "content"]
    val: frozenset[str]
    n_documents: int


def make_plan(
    files: list[tuple[str, Path]],
    rows: Callable[[str, Path], Iterator[tuple[str, str]]],
    val_fraction: float,
    whole: str | None,
) -> Plan:
    """Reads all documents once and chooses those of the validation part.

    Args:
        files: (name, path).
        rows: (name, path) of a table -> key and text of each row.
        whole: what rows are if they may not be cut, such as "conversation"; None: they may.

    Raises:
        ValueError: `val_fraction` cannot be met with whole rows, or a file cannot be read.
    """
    texts = [(name, path) for name, path in files if path.name.endswith(TEXT)]
    tables = [(name, path) for name, path in files if not path.name.endswith(TEXT)]
    if len(files) == len(texts) == 1:
        return Plan("position", "position", frozenset(), 1)
    near = len(texts) <= MAX_DOCUMENTS and sum(path.stat().st_size for _, path in files) <= MAX_BYTES
    of_rows = _row_sketches(tables, rows, near, MAX_DOCUMENTS - len(texts))
    sketches = {name: _file_sketch(path, near) for name, path in texts} | (of_rows or {})
    val = choose_val(list(sketches), list(sketches.values()), val_fraction, near) if sketches else None
    if whole is not None and of_rows and val is None:
        count = f"{len(of_rows)} {whole}{'s' if len(of_rows) > 1 else ''}, copies together"
        remedy = "give more, change data.val_fraction, or give other files with data.val_path"
        raise ValueError(f"data.val_fraction={val_fraction} cannot be met with {count}; {remedy}")
    rule: Literal["document", "position"] = "position" if val is None else "document"
    return Plan(rule, rule if of_rows is not None else "content", val or frozenset(), len(sketches))


def _row_sketches(
    tables: list[tuple[str, Path]], rows: Callable[[str, Path], Iterator[tuple[str, str]]], near: bool, limit: int
) -> dict[str, Sketch] | None:
    """A sketch per row that is not empty; None: there are more than `limit`."""
    sketches: dict[str, Sketch] = {}
    for name, path in tables:
        for key, text in rows(name, path):
            if len(sketches) >= limit:
                return None
            if text:
                sketches[key] = Sketch([content_key(text)], near)
    return sketches


def _file_sketch(path: Path, near: bool) -> Sketch:
    with damage(path), open_file(path) as file:
        return Sketch(iter(lambda: file.read(CHUNK), b""), near)


def split_position(read: Callable[[int, int], bytes], size: int, val_fraction: float) -> int:
    """Where the validation part of a text of `size` bytes starts, see `split_point`.

    Args:
        read: (start, end) -> the bytes between.
    """
    wanted = round(size * val_fraction)
    if wanted == 0:
        return size
    position = max(int(size * (1 - val_fraction)), 1)
    window = read(position - 1, min(position + min(max(wanted // 3, 4), SEARCH), size))
    return min(position - 1 + split_point(window), size)


@contextmanager
def damage(path: Path) -> Iterator[None]:
    """Names the file if reading it fails because it is damaged."""
    try:
        yield
    except damage_errors(path) as error:
        reason = printable(error)
        raise ValueError(f"{printable(path)} is damaged or incomplete ({reason}); copy or create it again") from error
