"""The user's own files: texts, and files of rows, in which every row is a document."""

import logging
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.data.sources.base import SPLIT_VERSION, Piece, Split, cut, digest_files, printable
from tril.data.sources.chat import PLAIN, ChatTemplate, Conversation, read_messages
from tril.data.sources.formats import find, has_rows, open_file, read_rows, read_text, reading, row_text
from tril.data.sources.split import (
    MAX_BYTES,
    MAX_DOCUMENTS,
    TOLERANCE,
    Document,
    choose_val,
    choose_whole,
    in_split,
    row_content,
    split_position,
)

MAX_SHOWN = 10  # files that cannot be read


class Row(NamedTuple):
    """A row of a file: its name, what decides the split, and of a chat its conversation."""

    name: str
    text: str
    conversation: Conversation | None


@plain_dataclass(frozen=True)
class Plan:
    """How the documents are split, see `data.sources.split`.

    Attributes:
        val: names of the documents for validation; None: the end of each document.
        by_content: rows are split by a hash of their content.
        rule: for the user.
        unreadable: the files that are left out.
    """

    val: frozenset[str] | None
    by_content: bool
    rule: str
    unreadable: frozenset[Path]


@dataclass(frozen=True, config=strict_settings("data"))
class Files:
    """UTF-8 text files, and rows of .jsonl, .json, .csv (all also with .gz) and .parquet. A file of text is a document,
    and so is a row. They are split as `data.sources.split` says; their names are relative to the common folder of all
    files, so that moving it does not change the split.

    With `format="chat"` the rows are conversations, which are never cut, and the split compares their messages without
    system prompts.
    """

    path: str | list[str] | None = setting(
        None, "a file, a folder (searched to every depth), a glob in quotes, or a list: '[a.txt,notes/*.md]'"
    )
    text_field: str = setting("text", "the key or column that holds the text of a row", needs="format=text")
    val_fraction: float = setting(
        0.05, "of the text: whole files and rows if possible, else the end of each", needs="val_path=null", gt=0, lt=1
    )
    val_path: str | list[str] | None = setting(
        None, "files to validate on, excluded from `path`; null: a part of `path`"
    )
    format: Literal["text", "chat"] = setting(
        "text", "chat: rows with messages, or prompt and response; trains on the answers"
    )
    chat_template: str | None = setting(
        None, "a file with a Jinja template; null: that of init_from, else a plain one", needs="format=chat"
    )
    on_error: Literal["stop", "skip"] = setting(
        "stop", "at files that cannot be read, which are all named; skip: leaves them out"
    )
    name = "files"

    @model_validator(mode="after")
    def _check(self) -> "Files":
        paths = {path for split in ("train", "val") for _, path in self.files(split)}
        tables = {path for path in paths if has_rows(path)}
        if self.text_field != "text" and (self.is_chat or not tables):
            cause = "with data.format=chat" if self.is_chat else "on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} has no effect {cause}; leave it out")
        if self.is_chat and paths != tables:
            text = printable(min(paths - tables))
            raise ValueError(f"data.format=chat needs files of rows, such as .jsonl, and {text} is text; leave it out")
        if not self.is_chat and self.chat_template is not None:
            raise ValueError(f"data.chat_template={self.chat_template} needs data.format=chat; leave it out")
        _ = self.template
        return self

    @property
    def is_chat(self) -> bool:
        return self.format == "chat"

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Of conversations."""
        if not self.is_chat or self.chat_template is None:
            return ChatTemplate(PLAIN, "the plain chat template") if self.is_chat else None
        path, name = Path(self.chat_template).expanduser(), f"data.chat_template={printable(self.chat_template)}"
        if not path.is_file():
            raise FileNotFoundError(f"{name} does not exist; give a file with a Jinja template")
        with reading(path):
            return ChatTemplate(path.read_text(encoding="utf-8"), name)

    def files(self, split: Split) -> list[tuple[str, Path]]:
        """(path relative to the common folder, path) of the files that contain `split`, sorted.

        Raises:
            ValueError: `val_path` matches all files of `path`.
            OSError: `path` or `val_path` matches nothing.
        """
        return self._files[split]

    @cached_property
    def _files(self) -> dict[Split, list[tuple[str, Path]]]:
        train = val = find("path", self.path)
        if self.val_path is not None:
            val = find("val_path", self.val_path)
            excluded = {path.resolve() for path in val}
            train = [path for path in train if path.resolve() not in excluded]
        if not train:
            cause = f"data.val_path={self.val_path} matches every file of data.path={self.path}"
            raise ValueError(f"{cause}; leave some to train on")

        def named(paths: list[Path]) -> list[tuple[str, Path]]:
            common = os.path.commonpath([path.parent for path in paths])
            return [(os.path.relpath(path, common), path) for path in paths]

        return {"train": named(train), "val": named(val)}

    def fingerprint(self) -> dict[str, Any]:
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        files = [(f"{split} {name}", path) for split in splits for name, path in self.files(split)]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        if self.template is not None:  # the template itself, which a run that starts from this one takes over
            common |= {"format": self.format, "chat_template": self.template.text}
        if self.on_error == "skip":  # which files are left out follows from their content
            common |= {"on_error": self.on_error}
        by_fraction = {"val_fraction": self.val_fraction, "split": SPLIT_VERSION}
        return common | (by_fraction if self.val_path is None else {"val_path": True})

    @property
    def split_rule(self) -> str:
        return self._plan.rule

    def pieces(self, split: Split) -> Iterator[Piece]:
        plan = self._plan
        for name, path in self.files(split):
            if path in plan.unreadable:
                continue
            with reading(path):
                if not has_rows(path):
                    if plan.val is None or (name in plan.val) == (split == "val"):
                        yield from self._text(path, None if plan.val is not None or self.val_path else split)
                    continue
                for row in self._rows(name, path):
                    text = self._part_of_row(row, split)
                    if row.conversation is None:
                        yield from cut(text)
                    elif text:
                        yield Piece(row.conversation.text(), True, row.conversation.turns)

    def _text(self, path: Path, split: Split | None) -> Iterator[Piece]:
        """A text file, or the part of it that is in `split` by position."""
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            middle = size if split is None else split_position(read, size, self.val_fraction)
            yield from read_text(file, *((middle, size) if split == "val" else (0, middle)))

    def _part_of_row(self, row: Row, split: Split) -> str:
        """The part of a row that is in `split`."""
        plan = self._plan
        if self.val_path is not None:
            return row.text
        if plan.by_content:
            return row.text if in_split(row.text, split, self.val_fraction) else ""
        if plan.val is not None:
            return row.text if (row.name in plan.val) == (split == "val") else ""
        data = row.text.encode()
        middle = split_position(lambda start, end: data[start:end], len(data), self.val_fraction)
        return (data[:middle] if split == "train" else data[middle:]).decode()

    def _rows(self, name: str, path: Path) -> Iterator[Row]:
        for number, (where, row) in enumerate(read_rows(path, self.text_field), start=1):
            if self.template is not None:
                conversation = Conversation(read_messages(row, where), self.template, where)
                yield Row(f"{name}:{number}", conversation.key(), conversation)
            else:
                yield Row(f"{name}:{number}", row_text(row, self.text_field, where), None)

    @cached_property
    def _plan(self) -> Plan:
        """Reads all documents once.

        Raises:
            ValueError: a file cannot be read, or whole conversations do not give `val_fraction`.
        """
        files = {path: name for split in ("train", "val") for name, path in self.files(split)}
        compare = self.val_path is None and sum(path.stat().st_size for path in files) <= MAX_BYTES
        texts: dict[str, Document] = {}
        rows: dict[str, Document] = {}
        problems, n_rows = {}, 0
        for path, name in files.items():
            try:
                with reading(path):
                    if not has_rows(path):
                        texts[name] = Document((piece.text.encode() for piece in self._text(path, None)), compare)
                        continue
                    for row in self._rows(name, path):
                        n_rows += bool(row.text)
                        if row.text and self.val_path is None and len(texts) + n_rows <= MAX_DOCUMENTS:
                            rows[row.name] = Document([row_content(row.text)], compare)
            except (ValueError, OSError) as error:
                problems[path] = str(error)
        self._report(problems, len(files))
        if self.val_path is not None:
            return Plan(None, False, "data.val_path", frozenset(problems))
        by_content = len(texts) + n_rows > MAX_DOCUMENTS and n_rows > 0
        documents = texts if by_content else texts | rows
        choose = choose_whole if self.is_chat and not by_content else choose_val
        val = choose(documents, self.val_fraction)
        rule = f"the end of each of {len(documents)} documents" if len(documents) > 1 else "the end of the text"
        if val is not None:
            what = "conversations" if self.is_chat else "documents"
            rule = f"{len(val)} of {len(documents)} {what} that share no passages with others"
        elif len(documents) > 1:
            rule += f" (whole ones would miss data.val_fraction by a factor of {TOLERANCE})"
        if by_content:
            rule = "rows by a hash of their content" + (f"; {rule}" if documents else "")
        return Plan(val, by_content, rule, frozenset(problems))

    def _report(self, problems: dict[Path, str], n_files: int) -> None:
        """Raises ValueError with all files that cannot be read, or names those that are left out."""
        if not problems:
            return
        if self.on_error == "stop" and len(problems) == 1:
            raise ValueError(*problems.values())
        if self.on_error == "stop":
            remedy = "correct them, or leave them out with data.on_error=skip"
            raise ValueError(f"{len(problems)} files cannot be read: {shown(problems.values())}; {remedy}")
        if len(problems) == n_files:
            raise ValueError(f"data.on_error=skip leaves no file: {shown(problems.values())}")
        files = "file" if len(problems) == 1 else "files"
        message = "data.on_error=skip leaves out %d %s: %s"
        logging.getLogger(__name__).warning(message, len(problems), files, shown(problems.values()))


def shown(problems: Collection[str]) -> str:
    """The first problems, and the number of the others."""
    first, more = "; ".join(list(problems)[:MAX_SHOWN]), len(problems) - MAX_SHOWN
    return f"{first}; and {more} more" if more > 0 else first
