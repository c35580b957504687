"""The user's own files: texts, and files of rows, in which every row is a document."""

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import printable, setting, strict_settings
from tril.data.sources.base import Document, Source, Split, digest_files
from tril.data.sources.chat import PLAIN, ChatTemplate, conversation
from tril.data.sources.formats import find, has_rows, read_rows, read_text, reading, row_text


@dataclass(frozen=True, config=strict_settings("data"))
class Files(Source):
    """UTF-8 text files, and rows of .jsonl, .json, .csv (all also with .gz) and .parquet. A file of text is a document,
    and so is a row. The names of documents are relative to the common folder of all files, so that moving it does not
    change the split.

    With `format="chat"` the rows are conversations, and the split compares their messages without system prompts.
    """

    path: str | list[str] | None = setting(
        None,
        "a file, a folder (searched to every depth), a glob in quotes, or a list: '[a.txt,notes/*.md]'",
        common=True,
    )
    text_field: str = setting("text", "the key or column that holds the text of a row", needs="format=text")
    val_fraction: float = setting(
        0.05,
        "of the text: whole files and rows if possible, else the end of each",
        common=True,
        needs="val_path=null",
        gt=0,
        lt=1,
    )
    val_path: str | list[str] | None = setting(
        None, "files to validate on, excluded from `path`; null: a part of `path`", common=True
    )
    format: Literal["text", "chat"] = setting(
        "text", "chat: rows with messages, or prompt and response; trains on the answers", common=True
    )
    chat_template: str | None = setting(
        None, "a file with a Jinja template; null: that of init_from, else a plain one", needs="format=chat"
    )
    name = "files"

    @model_validator(mode="after")
    def _check(self) -> "Files":
        paths = {path for files in self.files.values() for _, path in files}
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

    @property
    def separate_val(self) -> str | None:
        return None if self.val_path is None else "data.val_path"

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in self.files["train"])

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Of conversations."""
        if not self.is_chat:
            return None
        if self.chat_template is None:
            return ChatTemplate(PLAIN, "the plain chat template")
        path, name = Path(self.chat_template).expanduser(), f"data.chat_template={printable(self.chat_template)}"
        if not path.is_file():
            raise FileNotFoundError(f"{name} does not exist; give a file with a Jinja template")
        return ChatTemplate(read_text(path), name)

    @cached_property
    def files(self) -> dict[Split, list[tuple[str, Path]]]:
        """(path relative to the common folder, path) of the files that contain a part, sorted.

        Raises:
            ValueError: `val_path` matches all files of `path`.
            OSError: `path` or `val_path` matches nothing.
        """
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
        files = [(f"{split} {name}", path) for split in splits for name, path in self.files[split]]
        common = {"kind": self.name, "files": len(files), "sha256": digest_files(files), "text_field": self.text_field}
        if self.template is not None:  # the template itself, which a run that starts from this one takes over
            common |= {"format": self.format, "chat_template": self.template.text}
        return common | ({"val_fraction": self.val_fraction} if self.val_path is None else {"val_path": True})

    def documents(self, split: Split) -> Iterator[Document]:
        for name, path in self.files[split]:
            if not has_rows(path):
                yield Document(name, read_text(path))
                continue
            with reading(path):
                rows = read_rows(path, None if self.is_chat else self.text_field)
                for number, (where, row) in enumerate(rows, start=1):
                    if self.template is not None:
                        yield conversation(f"{name}:{number}", row, self.template, where)
                    else:
                        text = row_text(row, self.text_field, where)
                        yield Document(f"{name}:{number}", text, key=text.strip())
