"""The user's own files: texts, and files of rows, in which every row is a document."""

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.data.sources.base import Document, Source, Split, digest_files
from tril.data.sources.formats import find, has_rows, read_rows, read_text, reading, row_text


@dataclass(frozen=True, config=strict_settings("data"))
class Files(Source):
    """UTF-8 text files, and rows of .jsonl, .json, .csv (all also with .gz) and .parquet. A file of text is a document,
    and so is a row. The names of documents are relative to the common folder of all files, so that moving it does not
    change the split.
    """

    path: str | list[str] | None = setting(
        None,
        "a file, a folder (searched to every depth), a glob in quotes, or a list: '[a.txt,notes/*.md]'",
        common=True,
    )
    text_field: str = setting("text", "the key or column that holds the text of a row")
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
    name = "files"

    @model_validator(mode="after")
    def _check(self) -> "Files":
        paths = {path for files in self.files.values() for _, path in files}
        if self.text_field != "text" and not any(map(has_rows, paths)):
            cause = "has no effect on text files, which have no rows"
            raise ValueError(f"data.text_field={self.text_field} {cause}; leave it out")
        return self

    @property
    def separate_val(self) -> str | None:
        return None if self.val_path is None else "data.val_path"

    @property
    def n_bytes(self) -> int:
        return sum(path.stat().st_size for _, path in self.files["train"])

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
        return common | ({"val_fraction": self.val_fraction} if self.val_path is None else {"val_path": True})

    def documents(self, split: Split) -> Iterator[Document]:
        for name, path in self.files[split]:
            if not has_rows(path):
                yield Document(name, read_text(path))
                continue
            with reading(path):
                for number, (where, row) in enumerate(read_rows(path, self.text_field), start=1):
                    text = row_text(row, self.text_field, where)
                    yield Document(f"{name}:{number}", text, key=text.strip())
