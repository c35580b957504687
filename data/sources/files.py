"""The user's own files: texts, and files of rows, in which every row is a document."""

import io
import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.data.sources import split as rule
from tril.data.sources.base import Piece, Split, cut, digest_files, printable
from tril.data.sources.chat import PLAIN, ChatTemplate, Conversation, read_messages
from tril.data.sources.formats import find, has_rows, open_file, read_rows, read_text, reading, row_text


class Document(NamedTuple):
    """A text file, or a row of a file.

    Attributes:
        file: its UTF-8 text; of a conversation, what decides the split.
    """

    name: str
    file: BinaryIO
    is_row: bool
    conversation: Conversation | None = None

    def read(self, start: int, end: int) -> bytes:
        self.file.seek(start)
        return self.file.read(end - start)

    def size(self) -> int:
        return self.file.seek(0, os.SEEK_END)

    def content(self) -> Iterator[bytes]:
        """What decides the split."""
        if self.is_row:
            return iter([rule.row_content(self.read(0, self.size()).decode())])
        return (piece.text.encode() for piece in read_text(self.file, 0, self.size()))


class Plan(NamedTuple):
    """How the documents are split, see `data.sources.split`.

    Attributes:
        val: names of the documents for validation; None: the end of each document.
        by_content: rows are split by a hash of their content.
        rule: for the user.
    """

    val: frozenset[str] | None
    by_content: bool
    rule: str


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
    name = "files"

    @model_validator(mode="after")
    def _check(self) -> "Files":
        paths = {path for split in ("train", "val") for _, path in self.files(split)}
        texts = {path for path in paths if not has_rows(path)}
        if self.text_field != "text" and paths == texts:
            cause = "has no effect on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} {cause}; leave it out")
        if self.is_chat and texts:
            text = printable(min(texts))
            raise ValueError(f"data.format=chat needs files of rows, such as .jsonl, and {text} is text; leave it out")
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
        return common | ({"val_fraction": self.val_fraction} if self.val_path is None else {"val_path": True})

    @property
    def split_rule(self) -> str:
        return self._plan.rule

    def pieces(self, split: Split) -> Iterator[Piece]:
        for name, path in self.files(split):
            with reading(path):
                for document in self._documents(name, path):
                    start, end = self._range(document, split)
                    if not document.is_row:
                        yield from read_text(document.file, start, end)
                    elif document.conversation is None:
                        yield from cut(document.read(start, end).decode())
                    elif start < end:
                        yield Piece(document.conversation.text(), True, document.conversation.turns)

    def _documents(self, name: str, path: Path) -> Iterator[Document]:
        if not has_rows(path):
            with open_file(path) as file:
                yield Document(name, file, False)
            return
        rows = read_rows(path, None if self.is_chat else self.text_field)
        for number, (where, row) in enumerate(rows, start=1):
            conversation = Conversation(read_messages(row, where), self.template, where) if self.template else None
            text = conversation.key() if conversation else row_text(row, self.text_field, where)
            yield Document(f"{name}:{number}", io.BytesIO(text.encode()), True, conversation)

    def _range(self, document: Document, split: Split) -> tuple[int, int]:
        """The bytes of a document that are in `split`: from, to."""
        plan, size = self._plan, document.size()
        if self.val_path is not None:
            return 0, size
        if plan.by_content and document.is_row:
            is_in = rule.in_split(b"".join(document.content()), split, self.val_fraction)
        elif plan.val is not None:
            is_in = (document.name in plan.val) == (split == "val")
        else:
            middle = rule.split_position(document.read, size, self.val_fraction)
            return (0, middle) if split == "train" else (middle, size)
        return 0, size * is_in

    @cached_property
    def _plan(self) -> Plan:
        """Reads all documents once.

        Raises:
            ValueError: a file cannot be read, or whole conversations do not give `val_fraction`.
        """
        if self.val_path is not None:
            return Plan(None, False, "data.val_path")
        compare = sum(path.stat().st_size for _, path in self.files("train")) <= rule.MAX_BYTES
        texts: dict[str, rule.Document] = {}
        rows: dict[str, rule.Document] = {}
        n_rows = 0
        for name, path in self.files("train"):
            with reading(path):
                for document in self._documents(name, path):
                    if not document.is_row:
                        texts[name] = rule.Document(document.content(), compare)
                    elif document.size():
                        n_rows += 1
                        if len(texts) + n_rows <= rule.MAX_DOCUMENTS:
                            rows[document.name] = rule.Document(document.content(), compare)
        by_content = len(texts) + n_rows > rule.MAX_DOCUMENTS and n_rows > 0
        documents = texts if by_content else texts | rows
        try:
            val = rule.choose_val(documents, self.val_fraction)
        except ValueError:
            if self.is_chat and not by_content:
                raise
            val = None
        text = f"the end of each of {len(documents)} documents" if len(documents) > 1 else "the end of the text"
        if val is not None:
            what = "conversations" if self.is_chat else "documents"
            text = f"{len(val)} of {len(documents)} {what} that share no passages with others"
        elif len(documents) > 1:
            text += f" (whole ones would miss data.val_fraction by a factor of {rule.TOLERANCE})"
        if by_content:
            text = "rows by a hash of their content" + (f"; {text}" if documents else "")
        return Plan(val, by_content, text)
