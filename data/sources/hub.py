"""Data sets of the Hugging Face hub, or a local folder of files, through `datasets`."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import digest_files
from tril.data.settings import first_line, setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.rows import UnreadableError, text_of_row

COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, config=strict_settings("data"))
class Hub(Source):
    """Rows of a data set. Scripts that come with a data set are never run."""

    repo: str = setting(..., "owner/name, or a folder of files that `datasets` reads, such as parquet", common=True)
    config: str | None = setting(None, "the subset, if the data set has several", common=True)
    # a full commit (40 hex digits) is used without asking the hub
    revision: str = setting("main", "branch, tag or commit; resolved to a commit, which is recorded")
    text_field: str = setting("text", "the column that holds the text of a row", common=True)
    train_split: str = setting("train", "the split to train on")
    val_split: str | None = setting(
        "validation", "the split to validate on; null: val_fraction of the training rows", common=True
    )
    val_fraction: float = setting(0.005, "of the rows, by a hash of their content", needs="val_split=null", gt=0, lt=1)
    row_ends_document: bool = setting(True, "false: rows are the lines of a running text")
    streaming: bool = setting(False, "true: read over the network while preparing; false: download first")
    by_content = True

    @model_validator(mode="after")
    def _check(self) -> "Hub":
        if self.val_split == self.train_split:
            remedy = "use null to split the rows by val_fraction"
            raise ValueError(f"data.val_split={self.val_split} must differ from data.train_split; {remedy}")
        return self

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", Path(self.repo).name).strip("-").lower() or "hub"

    @property
    def own_split(self) -> str | None:
        return f"data.val_split={self.val_split}" if self.val_split else None

    @property
    def ends_documents(self) -> bool:
        return self.row_ends_document

    @property
    def _folder(self) -> Path | None:
        folder = Path(self.repo).expanduser()
        return folder if folder.is_dir() else None

    @cached_property
    def resolved_revision(self) -> str:
        """The commit on the hub (40 hex digits), or the sha256 of the files of a local folder.

        Raises:
            OSError: the hub cannot be reached or does not know the data set or the revision.
        """
        if folder := self._folder:
            files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
            return digest_files((name, path) for name, path in files.items() if "/." not in f"/{name}")  # not hidden
        if COMMIT.fullmatch(self.revision):
            return self.revision
        from huggingface_hub import HfApi

        try:
            return str(HfApi().dataset_info(self.repo, revision=self.revision).sha)
        except Exception as error:  # network, server and library errors have no common base class
            raise self._unreadable(error) from error

    def fingerprint(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("config", "text_field", "train_split", "row_ends_document")}
        values |= {"kind": "hub", "revision": self.resolved_revision}
        values["repo"] = "local folder" if self._folder else self.repo
        split = {"val_split": self.val_split} if self.val_split else {"val_fraction": self.val_fraction}
        return values | split

    def documents(self, split: Split) -> Iterator[Document]:
        import datasets

        name = self.val_split if split == "val" and self.val_split else self.train_split
        path, revision = (str(self._folder), None) if self._folder else (self.repo, self.resolved_revision)
        options = {"split": name, "revision": revision, "streaming": self.streaming}
        try:
            for number, row in enumerate(datasets.load_dataset(path, self.config, **options)):
                yield Document(str(number), text_of_row(row, self.text_field, f"row {number}"), is_row=True)
        except UnreadableError as error:
            raise ValueError(f"{self.repo}, split {name}, {error}") from error
        except Exception as error:  # as above
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> OSError:
        name = f"{self.repo} (config {self.config}, revision {self.revision})"
        remedy = "check name, splits and network, set HF_ENDPOINT to a mirror, or give a folder of parquet files"
        return OSError(f"cannot read the data set {name}: {first_line(error)}; {remedy} with data.repo=FOLDER")
