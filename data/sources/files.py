"""The user's own files: texts, and tables in which every row is a document."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.families import Sketch
from tril.data.sources.base import (
    SETTINGS,
    SPLIT_VERSION,
    Piece,
    Split,
    ValFraction,
    content_key,
    cut,
    digest_files,
    in_split,
    printable,
)
from tril.data.sources.chat import PLAIN, ChatTemplate, Conversation, read_messages
from tril.data.sources.file_formats import (
    JSON_LINES,
    PARQUET,
    SUFFIXES,
    TEXT,
    damage_errors,
    find,
    json_rows,
    open_file,
    parquet_rows,
    read_text,
    row_text,
)
from tril.data.sources.split import MAX_BYTES, MAX_DOCUMENTS, TOLERANCE, choose_val, split_point

SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for
CHUNK = 1 << 20  # bytes read at a time to compare documents


@plain_dataclass(frozen=True)
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


@dataclass(frozen=True, config=SETTINGS)
class Files:
    """Files with one of `file_formats.SUFFIXES`. Text files and the rows of .jsonl and .parquet files are documents.

    About `val_fraction` of the text is for validation: whole documents in the order of a hash of their names, with
    copies and near-copies on one side. If that cannot meet the fraction within a factor of 1.5, as with one file, the
    last `val_fraction` of each document is for validation. Of more than MAX_DOCUMENTS documents, the rows are split by
    a hash of their content, which keeps only exact copies together. The names are relative to the common folder of all
    files, so moving that folder does not change the split.

    With `format="chat"` the rows of .jsonl files are conversations, which are never cut, and the split compares their
    messages without system prompts.

    Args:
        path: a file, a folder (searched recursively), or a glob (`**` for any depth).
        text_field: the key or column that holds the text of a row.
        val_path: like `path`; these files are the validation part, the other files of `path` the training part.
        format: "chat": rows have `messages`, or `prompt` and `response`; see `data.sources.chat`.
        chat_template: a file with a Jinja template; None: `PLAIN`.
    """

    path: str | None
    text_field: str = "text"
    val_fraction: ValFraction = 0.05
    val_path: str | None = None
    format: Literal["text", "chat"] = "text"
    chat_template: str | None = None
    name = "files"
    max_overlap = None

    @model_validator(mode="after")
    def _check_files(self) -> "Files":
        if self.is_chat and self.text_field != "text":
            raise ValueError(f"data.text_field={self.text_field} has no effect with data.format=chat; leave it out")
        if not self.is_chat and self.chat_template is not None:
            raise ValueError(f"data.chat_template={self.chat_template} needs data.format=chat; leave it out")
        self.files("train")
        if self.is_chat:
            _ = self.template
        return self

    @property
    def is_chat(self) -> bool:
        return self.format == "chat"

    @cached_property
    def template(self) -> ChatTemplate:
        """Of conversations."""
        if self.chat_template is None:
            return ChatTemplate(PLAIN, "the plain chat template")
        path, name = Path(self.chat_template).expanduser(), f"data.chat_template={printable(self.chat_template)}"
        if not path.is_file():
            raise FileNotFoundError(f"{name} does not exist; give a file with a Jinja template")
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), name)
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} is not UTF-8 ({error.reason}); convert it") from error

    def files(self, split: Split) -> list[tuple[str, Path]]:
        """(path relative to the common folder, path) of the files that contain `split`, sorted.

        Raises:
            ValueError: `path` or `val_path` matches an unsupported file, or `val_path` matches all files of `path`.
            OSError: `path` or `val_path` matches nothing.
        """
        suffixes = JSON_LINES if self.is_chat else SUFFIXES
        paths = find("path", self.path, suffixes)
        if self.val_path is not None:
            val_paths = find("val_path", self.val_path, suffixes)
            excluded = {path.resolve() for path in val_paths}
            paths = val_paths if split == "val" else [path for path in paths if path.resolve() not in excluded]
        if not paths:
            raise ValueError(
                f"data.val_path={self.val_path} matches every file of data.path={self.path}; leave some to train on"
            )
        common = os.path.commonpath([path.parent for path in paths])
        return [(os.path.relpath(path, common), path) for path in paths]

    def fingerprint(self) -> dict[str, Any]:
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{split} {name}", path) for split in splits for name, path in self.files(split)]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        if self.is_chat:  # the template itself, which a run that starts from this one takes over
            common |= {"format": self.format, "chat_template": self.template.text}
        by_fraction = {"val_fraction": self.val_fraction, "split": SPLIT_VERSION}
        return common | (by_fraction if self.val_path is None else {"val_path": True})

    @property
    def split_rule(self) -> str:
        if self.val_path is not None:
            return "data.val_path"
        plan, count = self._plan, f"{len(self._plan.val)} of {self._plan.n_documents}"
        if plan.rows == "content":
            texts = f"; {count} text files" if plan.val else "; the end of each text file" if plan.n_documents else ""
            return f"rows by a hash of their content{texts}"
        if plan.texts == "document":
            return f"{count} {'conversations' if self.is_chat else 'documents'}, copies and near-copies on one side"
        if plan.n_documents == 1:
            return "the end of the text"
        return f"the end of each of {plan.n_documents} documents (whole ones would miss it by a factor of {TOLERANCE})"

    def pieces(self, split: Split) -> Iterator[Piece]:
        return self._pieces(self.files(split), split, None if self.val_path is not None else self._plan)

    def all_pieces(self) -> Iterator[Piece]:
        """The whole text of `path`."""
        return self._pieces(self.files("train"), "train", None)

    def _pieces(self, files: list[tuple[str, Path]], split: Split, plan: Plan | None) -> Iterator[Piece]:
        """The pieces of one part; of all `files` without a plan."""
        for name, path in files:
            with _damage(path):
                if path.name.endswith(TEXT):
                    if plan is None or plan.texts == "position" or (name in plan.val) == (split == "val"):
                        yield from self._text(path, split if plan and plan.texts == "position" else None)
                    continue
                for key, text, conversation in self._rows(name, path):
                    part = self._row_part(key, text, split, plan)
                    if conversation is None:
                        yield from cut(part)
                    elif part:
                        yield Piece(conversation.text(), True, conversation.turns)

    def _text(self, path: Path, split: Split | None) -> Iterator[Piece]:
        """A text file, or the part of it that is in `split` by position."""
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            middle = size if split is None else split_position(read, size, self.val_fraction)
            start, end = {None: (0, size), "train": (0, middle), "val": (middle, size)}[split]
            try:
                yield from read_text(file, start, end)
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{printable(path)} is not UTF-8 ({error.reason}); convert it, e.g. iconv -f latin1 -t utf-8"
                ) from error

    def _row_part(self, key: str, text: str, split: Split, plan: Plan | None) -> str:
        """The part of a row that is in `split`."""
        if plan is None:
            return text
        if plan.rows == "position":
            data = text.encode()
            middle = split_position(lambda start, end: data[start:end], len(data), self.val_fraction)
            return (data[:middle] if split == "train" else data[middle:]).decode()
        is_here = (
            (key in plan.val) == (split == "val")
            if plan.rows == "document"
            else in_split(content_key(text), split, self.val_fraction)
        )
        return text if is_here else ""

    def _rows(self, name: str, path: Path) -> Iterator[tuple[str, str, Conversation | None]]:
        """Name and text of every row of a table, and of a chat its conversation."""
        is_parquet = path.name.endswith(PARQUET)
        rows = enumerate(parquet_rows(path, path, self.text_field), start=1) if is_parquet else json_rows(path)
        for number, row in rows:
            where = f"{printable(path)}, {'row' if is_parquet else 'line'} {number}"
            if self.is_chat:
                conversation = Conversation(read_messages(row, where), self.template, where)
                yield f"{name}:{number}", conversation.key(), conversation
            else:
                yield f"{name}:{number}", row_text(row, self.text_field, where), None

    @cached_property
    def _plan(self) -> Plan:
        """Reads all documents once."""
        files = self.files("train")
        texts = [(name, path) for name, path in files if path.name.endswith(TEXT)]
        tables = [(name, path) for name, path in files if not path.name.endswith(TEXT)]
        if len(files) == len(texts) == 1:
            return Plan("position", "position", frozenset(), 1)
        near = len(texts) <= MAX_DOCUMENTS and sum(path.stat().st_size for _, path in files) <= MAX_BYTES
        rows = self._row_sketches(tables, near, MAX_DOCUMENTS - len(texts))
        sketches = {name: _file_sketch(path, near) for name, path in texts} | (rows or {})
        val = choose_val(list(sketches), list(sketches.values()), self.val_fraction, near) if sketches else None
        if self.is_chat and rows and val is None:
            count = f"{len(rows)} conversation{'s' if len(rows) > 1 else ''}, copies together"
            remedy = "give more, change data.val_fraction, or give other files with data.val_path"
            raise ValueError(f"data.val_fraction={self.val_fraction} cannot be met with {count}; {remedy}")
        rule: Literal["document", "position"] = "position" if val is None else "document"
        return Plan(rule, rule if rows is not None else "content", val or frozenset(), len(sketches))

    def _row_sketches(self, tables: list[tuple[str, Path]], near: bool, limit: int) -> dict[str, Sketch] | None:
        """A sketch per row that is not empty; None: there are more than `limit`."""
        sketches: dict[str, Sketch] = {}
        for name, path in tables:
            with _damage(path):
                for key, text, _ in self._rows(name, path):
                    if len(sketches) >= limit:
                        return None
                    if text:
                        sketches[key] = Sketch([content_key(text)], near)
        return sketches


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


def _file_sketch(path: Path, near: bool) -> Sketch:
    with _damage(path), open_file(path) as file:
        return Sketch(iter(lambda: file.read(CHUNK), b""), near)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Names the file if reading it fails because it is damaged."""
    try:
        yield
    except damage_errors(path) as error:
        reason = printable(error)
        raise ValueError(f"{printable(path)} is damaged or incomplete ({reason}); copy or create it again") from error
