"""Data sets of the Hugging Face hub as a source, through `datasets`; the same call reads a local folder of parquet files."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tril.data.sources.base import Piece, Split, check_fraction, cut, digest_files, in_split
from tril.data.sources.files import PARQUET_ROWS, row_text

COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Hub:
    """Rows of a data set; scripts that come with one are never run.

    repo: "owner/name", or a local folder of files that `datasets` reads, such as parquet.
    config: the subset, where the data set has several.
    revision: branch, tag or commit. It is resolved to a commit, which goes into the fingerprint; a full commit (40 hex digits)
        needs no network for that. A local folder's revision is a hash of its files.
    val_split: the split to validate on; None takes about `val_fraction` of the rows of `train_split`, by a hash of the row number.
    row_ends_document: False where rows are only lines of a running text.
    streaming: read over the network while preparing; otherwise the whole data set is downloaded first.
    """

    repo: str
    config: str | None = None
    revision: str = "main"
    text_field: str = "text"
    train_split: str = "train"
    val_split: str | None = "validation"
    val_fraction: float = 0.005
    row_ends_document: bool = True
    streaming: bool = False

    def __post_init__(self) -> None:
        check_fraction(self.val_fraction)
        if not isinstance(self.repo, str) or not (self._is_local or re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.repo)):
            raise ValueError(f"data.repo={self.repo}: neither a folder nor a name on the hub such as owner/name")
        for key, split in (("train_split", self.train_split), ("val_split", self.val_split)):
            if split is not None and not re.fullmatch(r"[\w.-]+", split):
                raise ValueError(
                    f"data.{key}={split}: must be the name of a whole split; for less text set data.token_budget"
                )
        if self.val_split == self.train_split:
            raise ValueError(
                f"data.val_split={self.val_split}: the same as data.train_split; null splits the rows by val_fraction"
            )

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", Path(self.repo).name).strip("-").lower() or "hub"

    @property
    def _is_local(self) -> bool:
        return Path(self.repo).expanduser().is_dir()

    @cached_property
    def resolved_revision(self) -> str:
        """The commit on the hub (40 hex digits), or the sha256 of the files of a local folder.

        Raises:
            OSError: the hub cannot be asked or does not know the data set or the revision.
        """
        if self._is_local:
            folder = Path(self.repo).expanduser()
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            return digest_files((path.relative_to(folder).as_posix(), path) for path in files)
        if COMMIT.fullmatch(self.revision):
            return self.revision
        from huggingface_hub import HfApi

        try:
            return HfApi().dataset_info(self.repo, revision=self.revision).sha
        except Exception as error:  # network, server and library errors have no common ancestor
            raise self._unreachable(error) from error

    def fingerprint(self) -> dict[str, Any]:
        split = {"val_split": self.val_split} if self.val_split else {"val_fraction": self.val_fraction}
        return {
            "kind": "hub",
            "repo": "local folder" if self._is_local else self.repo,
            "config": self.config,
            "revision": self.resolved_revision,
            "text_field": self.text_field,
            "train_split": self.train_split,
            "row_ends_document": self.row_ends_document,
            **split,
        }

    def pieces(self, split: Split) -> Iterator[Piece]:
        separate = self.val_split is not None
        name = self.val_split if separate and split == "val" else self.train_split
        for number, row in enumerate(self._rows(name)):
            if separate or in_split(str(number), split, self.val_fraction):
                text = row_text(row, self.text_field, f"{self.repo}, split {name}, row {number}")
                yield from cut(text, ends_document=self.row_ends_document)

    def _rows(self, split: str) -> Iterator[dict[str, Any]]:
        """The rows of one split of the data set.

        Raises:
            OSError: it cannot be reached or read.
        """
        import datasets

        path = str(Path(self.repo).expanduser()) if self._is_local else self.repo
        revision = None if self._is_local else self.resolved_revision
        try:
            if self.streaming:
                builder = datasets.load_dataset_builder(path, self.config, revision=revision)
                is_parquet = type(builder.config).__name__ == "ParquetConfig"
                rows = (
                    self._parquet_rows(builder.config.data_files, split)
                    if is_parquet
                    else builder.as_streaming_dataset(split)
                )
                yield from rows
            else:
                dataset = datasets.load_dataset(path, self.config, split=split, revision=revision)
                for file in dataset.cache_files:  # one at a time: memory-mapped together they all become resident
                    yield from datasets.Dataset.from_file(file["filename"])
        except Exception as error:  # as above
            raise self._unreachable(error) from error

    def _parquet_rows(self, data_files: dict[str, list[str]], split: str) -> Iterator[dict[str, Any]]:
        """What streaming gives, read no further ahead than needed; `datasets` lets about 1 GB of decoded rows pile up."""
        import fsspec
        import pyarrow.parquet

        if split not in data_files:
            raise ValueError(f"no split {split}, there are {', '.join(map(str, data_files))}")
        for address in data_files[split]:
            with fsspec.open(address) as file, pyarrow.parquet.ParquetFile(file) as table:
                columns = [self.text_field] if self.text_field in table.schema_arrow.names else None
                for batch in table.iter_batches(PARQUET_ROWS, columns=columns):
                    yield from batch.to_pylist()

    def _unreachable(self, error: Exception) -> OSError:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return OSError(
            f"cannot read the data set {self.repo} (config {self.config}, revision {self.revision}): {reason}; check name, splits and "
            "network, set HF_ENDPOINT to a mirror, or pass data.repo=FOLDER with parquet files"
        )
