"""The user's own files: texts, and tables in which every row is a document."""

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.data.sources.base import SPLIT_VERSION, Piece, Split, content_key, cut, digest_files, in_split, printable
from tril.data.sources.chat import PLAIN, ChatTemplate, Conversation, read_messages
from tril.data.sources.file_formats import (
    CSV,
    JSON_LINES,
    PARQUET,
    SUFFIXES,
    TEXT,
    csv_rows,
    find,
    json_array,
    json_rows,
    open_file,
    parquet_rows,
    read_text,
    row_text,
)
from tril.data.sources.file_plan import Plan, damage, make_plan, split_position
from tril.data.sources.split import TOLERANCE

MAX_SHOWN = 10  # files that cannot be read
SEARCH = 1 << 16  # bytes after the wanted position in which a line start or white space is looked for
CHUNK = 1 << 20  # bytes read at a time to compare documents

logger = logging.getLogger(__name__)


@dataclass(frozen=True, config=strict_settings("data"))
class Files:
    """Files with one of `file_formats.SUFFIXES`. Text files and the rows of tables (.jsonl, .json, .csv, .parquet) are
    documents.

    About `val_fraction` of the text is for validation: whole documents in the order of a hash of their names, with
    copies and near-copies on one side. If that cannot meet the fraction within a factor of 1.5, as with one file, the
    last `val_fraction` of each document is for validation. Of more than MAX_DOCUMENTS documents, the rows are split by
    a hash of their content, which keeps only exact copies together. The names are relative to the common folder of all
    files, so moving that folder does not change the split.

    With `format="chat"` the rows of .jsonl files are conversations, which are never cut, and the split compares their
    messages without system prompts.
    """

    path: str | list[str] | None = setting(
        None, "a file, a folder (searched to every depth), a glob in quotes, or a list: '[a.txt,notes/*.md]'"
    )
    text_field: str = setting("text", "the key or column that holds the text of a row", needs="format=text")
    val_fraction: float = setting(
        0.05, "of the text: whole files and rows if possible, copies together", needs="val_path=null", gt=0, lt=1
    )
    val_path: str | list[str] | None = setting(
        None, "files to validate on, excluded from `path`; null: a part of `path`"
    )
    format: Literal["text", "chat"] = setting(
        "text", "chat: .jsonl rows with messages, or prompt and response; trains on the answers"
    )
    chat_template: str | None = setting(
        None, "a file with a Jinja template; null: that of init_from, else a plain one", needs="format=chat"
    )
    on_error: Literal["stop", "skip"] = setting(
        "stop", "at files that cannot be read, which are all named; skip: leaves them out"
    )
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
        if self.on_error == "skip":  # which files are left out follows from their content
            common |= {"on_error": self.on_error}
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
        with self._all_problems():
            plan = None if self.val_path is not None else self._plan
            yield from self._pieces(self._readable(split), split, plan)

    def all_pieces(self) -> Iterator[Piece]:
        """The whole text of `path`."""
        with self._all_problems():
            yield from self._pieces(self._readable("train"), "train", None)

    def _readable(self, split: Split) -> list[tuple[str, Path]]:
        """The files of `split` without those that are skipped."""
        if self.on_error == "stop":
            return self.files(split)
        left = [(name, path) for name, path in self.files(split) if path not in self._skipped]
        if not left:
            raise ValueError(f"data.on_error=skip leaves no file of the {split} part: {shown(self._skipped.values())}")
        return left

    @cached_property
    def _skipped(self) -> dict[Path, str]:
        problems = self._problems()
        if problems:
            files = "file" if len(problems) == 1 else "files"
            logger.warning("data.on_error=skip leaves out %d %s: %s", len(problems), files, shown(problems.values()))
        return problems

    def _problems(self) -> dict[Path, str]:
        """Why files cannot be read. Reads them all."""
        splits: tuple[Split, ...] = ("train",) if self.val_path is None else ("train", "val")
        problems = {}
        for name, path in {path: (name, path) for split in splits for name, path in self.files(split)}.values():
            try:
                for _ in self._pieces([(name, path)], "train", None):
                    pass
            except (ValueError, OSError) as error:
                problems[path] = str(error)
        return problems

    @contextmanager
    def _all_problems(self) -> Iterator[None]:
        """Names all files that cannot be read instead of the first one."""
        try:
            yield
        except (ValueError, OSError) as error:
            problems = self._problems() if self.on_error == "stop" else {}
            if len(problems) < 2:
                raise
            remedy = "correct them, or leave them out with data.on_error=skip"
            raise ValueError(f"{len(problems)} files cannot be read: {shown(problems.values())}; {remedy}") from error

    def _pieces(self, files: list[tuple[str, Path]], split: Split, plan: Plan | None) -> Iterator[Piece]:
        """The pieces of one part; of all `files` without a plan."""
        for name, path in files:
            with damage(path):
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
        if path.name.endswith(PARQUET):
            rows = enumerate(parquet_rows(path, path, self.text_field), start=1)
        elif path.name.endswith(CSV):
            rows = csv_rows(path)
        else:
            rows = json_rows(path) if path.name.endswith(JSON_LINES) else json_array(path, self.text_field)
        unit = "line" if path.name.endswith(JSON_LINES) else "row"
        for number, row in rows:
            where = f"{printable(path)}, {unit} {number}"
            if self.is_chat:
                conversation = Conversation(read_messages(row, where), self.template, where)
                yield f"{name}:{number}", conversation.key(), conversation
            else:
                yield f"{name}:{number}", row_text(row, self.text_field, where), None

    @cached_property
    def _plan(self) -> Plan:
        def rows(name: str, path: Path) -> Iterator[tuple[str, str]]:
            with damage(path):
                yield from ((key, text) for key, text, _ in self._rows(name, path))

        files = self._readable("train")
        if empty := [printable(path) for _, path in files if not path.stat().st_size]:
            logger.warning("without text: %s", shown(empty))
        return make_plan(files, rows, self.val_fraction, "conversation" if self.is_chat else None)


def shown(problems: Collection[str]) -> str:
    """The first problems, and the number of the others."""
    first, more = "; ".join(list(problems)[:MAX_SHOWN]), len(problems) - MAX_SHOWN
    return f"{first}; and {more} more" if more > 0 else first
