"""The text that a checkpoint is evaluated on, in the tokens of its own tokenizer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tril.model.runs import SETTINGS, run_folder
from tril.scripts.common.cli import task_overrides
from tril.scripts.common.finished_run import Run, prepared_text, read_run

if TYPE_CHECKING:
    import numpy as np

    from tril.data.config import DataConfig
    from tril.data.prepared import PreparedText
    from tril.data.sources.base import Split

Part = Literal["val", "all"]
UNUSED = ("tokenizer", "batch_size", "val_batch_size", "document_mask", "old_path")  # keys of data: without effect here
MIXTURE = "mixture"  # the source that is several texts
SPLIT = {"val_fraction", "split"}  # entries of a source's fingerprint that only split its text


@dataclass(frozen=True)
class EvaluatedText:
    """A text.

    Attributes:
        tokens: (number of tokens,) ids.
        name: which text it is, for the reader.
        n_bytes: UTF-8 bytes of the text.
        n_unknown: tokens that stand for characters that the tokenizer does not have.
        fingerprint: of text, split and tokenizer.
    """

    tokens: np.ndarray
    name: str
    n_bytes: int
    n_unknown: int
    fingerprint: str

    def n_documents(self, eot_id: int) -> int:
        """Documents that contain a token with a target."""
        return int((self.tokens[1:-1] == eot_id).sum()) + 1

    def describe(self) -> dict[str, Any]:
        sizes = {"tokens": len(self.tokens), "bytes": self.n_bytes, "unknown_tokens": self.n_unknown}
        return {"name": self.name, "fingerprint": self.fingerprint} | sizes


def read_subject(checkpoint: Path, *, needs_settings: bool) -> Run:
    """The run of a checkpoint; with empty settings for a file outside of a run's folder.

    Raises:
        FileNotFoundError: the settings are needed, and the checkpoint is not in a run's folder.
    """
    if needs_settings or (run_folder(checkpoint) / SETTINGS).is_file():
        return read_run(checkpoint)
    from tril.model.checkpoint import read

    content = read(checkpoint, entries=("tril", "global_step"))
    return Run(checkpoint, {}, content.get("global_step"), content["tril"])


def parse_data(data: dict[str, Any] | None, part: Part) -> DataConfig | None:
    """The settings below data:, checked; None for the run's own text.

    Raises:
        ValueError: an invalid setting, or one that has no effect.
        OSError: a file that does not exist.
    """
    if data is None:
        if part != "val":
            raise ValueError(f"part={part} needs a text, such as data=files data.path=FILE; the run's own is part=val")
        return None
    for override in task_overrides():
        key = override.partition("=")[0].lstrip("+~").split(".")
        if key[0] == "data" and key[1:2] and key[1] in UNUSED:
            raise ValueError(f"{override} has no effect: the checkpoint decides it; leave it out")
    from tril.data.config import parse

    if data.get("format") == "chat":
        raise ValueError("data.format=chat has no effect: whole texts are scored, and not answers; leave it out")
    config = parse(data)
    if config.source.name == MIXTURE:
        raise ValueError("data=mixture has several texts; evaluate one of its sources, such as data=stdlib")
    return config


def read_text(data: DataConfig | None, part: Part, owner: Run, reader: Run) -> EvaluatedText:
    """The text in the tokens of `reader`.

    Args:
        data: None: the validation part of `owner`.
        part: of `data`.
    """
    if data is None and owner.settings["data"].get("source") == MIXTURE:
        sources = f"the mixture of {', '.join(owner.settings['data']['sources'])}"
        remedy = "evaluate one of them, such as data=stdlib, or data=files data.path=PATH"
        raise ValueError(f"{owner.checkpoint} was trained on {sources}; {remedy}")
    if data is None and same_tokenizer(owner, reader):
        [prepared] = prepared_text(owner).texts.values()
        return _text(prepared, ("val",), "the validation part of the run")
    if data is None:
        from tril.data.config import parse

        prepared_text(owner)  # raises if the text has changed since
        data, name = parse(owner.settings["data"]), "the validation part of the run"
    else:
        name = f"the {'whole text' if part == 'all' else 'validation part'} of data.source={data.source.name}"
    prepared = _prepare(data, part, reader)
    remark = ", which may contain training text of the checkpoint" if _may_overlap(prepared, part, reader) else ""
    return _text(prepared, ("train", "val") if part == "all" else ("val",), name + remark)


def same_tokenizer(a: Run, b: Run) -> bool:
    return all(a.metadata[key] == b.metadata[key] for key in ("tokenizer", "eot"))


def _prepare(data: DataConfig, part: Part, reader: Run) -> PreparedText:
    from tril.data.mixture import Mixture
    from tril.data.prepare import prepare
    from tril.data.tokenizer import TokenizerConfig

    assert not isinstance(data.source, Mixture)  # refused before
    budget = data.token_budget if part == "all" else 1  # the least that `prepare` encodes of the training part
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(reader.metadata["tokenizer"], encoding="utf-8")
        tokenizer = TokenizerConfig(kind="file", path=str(path), eot=reader.metadata["eot"])
        budgets = {"token_budget": budget, "val_token_budget": data.val_token_budget}
        return prepare(data.source, tokenizer, data.cache_dir, progress=False, **budgets)


def _may_overlap(prepared: PreparedText, part: Part, reader: Run) -> bool:
    """Whether it is a text of the checkpoint, and not its validation part."""
    source, trained = prepared.meta["source"], reader.metadata["data"].get("source", {})
    sources = trained["sources"].values() if trained.get("kind") == MIXTURE else [trained]
    same = [each for each in sources if _whole(each) == _whole(source)]
    return bool(same) and (part == "all" or source not in same)


def _whole(source: dict[str, Any]) -> dict[str, Any]:
    """A source's fingerprint without its split."""
    return {key: value for key, value in source.items() if key not in SPLIT}


def _text(prepared: PreparedText, splits: tuple[Split, ...], name: str) -> EvaluatedText:
    import numpy as np

    counts = [prepared.meta["counts"][split] for split in splits]
    tokens = np.concatenate([prepared.tokens(split) for split in splits])
    totals = {f"n_{key}": sum(count[key] for count in counts) for key in ("bytes", "unknown")}
    if len(tokens) < 2:
        raise ValueError(f"{name} has {len(tokens)} tokens, at least 2 are needed; give more text")
    return EvaluatedText(tokens, name, fingerprint=prepared.meta["fingerprint"], **totals)
