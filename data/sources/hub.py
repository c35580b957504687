"""Data sets of the Hugging Face hub, through `datasets`. A folder with such files is text as any other: `Files`."""

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from pydantic import model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import one_line, setting, strict_settings
from tril.data.sources.base import Document, Source, Split
from tril.data.sources.rows import text_of_row

COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, config=strict_settings("data"))
class Hub(Source):
    """Rows of a data set. Scripts that come with a data set are never run."""

    repo: str = setting(..., "owner/name", common=True)
    config: str | None = setting(None, "the subset, if the data set has several", common=True)
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
        return re.sub(r"[^A-Za-z0-9]+", "-", self.repo.rpartition("/")[2]).strip("-").lower() or "hub"

    @property
    def own_split(self) -> str | None:
        return f"data.val_split={self.val_split}" if self.val_split else None

    @property
    def ends_documents(self) -> bool:
        return self.row_ends_document

    @cached_property
    def commit(self) -> str:
        """The commit of the revision, 40 hex digits; of a commit, the hub is not asked.

        Raises:
            OSError: the hub cannot be reached or does not know the data set or the revision.
        """
        if COMMIT.fullmatch(self.revision):
            return self.revision
        from huggingface_hub import HfApi

        try:
            return str(HfApi().dataset_info(self.repo, revision=self.revision).sha)
        except Exception as error:  # network, server and library errors have no common base class
            raise self._unreadable(error) from error

    def fingerprint(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("config", "text_field", "train_split", "row_ends_document")}
        values |= {"kind": "hub", "revision": self.commit, "repo": self.repo}
        return values | ({"val_split": self.val_split} if self.val_split else {"val_fraction": self.val_fraction})

    def documents(self, split: Split) -> Iterator[Document]:
        import datasets

        name = self.val_split if split == "val" and self.val_split else self.train_split
        options = {"split": name, "revision": self.commit, "streaming": self.streaming}
        try:
            for number, row in enumerate(datasets.load_dataset(self.repo, self.config, **options)):
                yield Document(str(number), text_of_row(row, self.text_field), is_row=True)
        except Exception as error:  # as above
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> OSError:
        name = f"{self.repo} (config {self.config}, revision {self.revision})"
        remedy = "check name, splits and network, set HF_ENDPOINT to a mirror, or read files with data.path=FOLDER"
        return OSError(f"cannot read the data set {name}: {one_line(error)}; {remedy}")
