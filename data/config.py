"""The settings below `data:`, checked before anything expensive starts."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from tril.data.mixture import SINGLE, Mixture, PreparedMixture, prepare_source
from tril.data.prepared import PreparedText
from tril.data.settings import setting, strict_settings
from tril.data.sources.file_formats import find
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose
from tril.data.sources.single_text import SingleText
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig

SOURCES = SINGLE | {Mixture.name: Mixture}
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=strict_settings("data"))
class DataConfig:
    """The settings below `data:` that every source has: arguments of `TextDataModule`, and `old_path`."""

    source: StandardLibrary | Prose | SingleText | Files | Hub | Mixture = setting(..., "the text; set by data=NAME")
    tokenizer: TokenizerConfig = setting(TokenizerConfig(), "text <-> token ids")
    batch_size: int = setting(8, "windows per device and step", ge=1)
    val_batch_size: Count | None = setting(None, "windows per device in validation; null: batch_size")
    cache_dir: str | None = setting(None, "null: $TRIL_CACHE, else $XDG_CACHE_HOME/tril, else ~/.cache/tril")
    token_budget: Count | None = setting(None, "training tokens to prepare, of a mixture from each source; null: all")
    val_token_budget: Count | None = setting(None, "validation tokens to prepare, likewise")
    document_mask: bool = setting(
        False, "true: documents in a window do not attend to each other; positions restart in each"
    )
    old_path: str | None = setting(
        None, "with init_from: a file or folder; the run ends with the loss on it before and after training"
    )

    @field_validator("cache_dir")
    @classmethod
    def _check_cache_dir(cls, cache_dir: str | None) -> str | None:
        if cache_dir and Path(cache_dir).expanduser().is_file():
            raise ValueError(f"data.cache_dir={cache_dir} is a file; give a folder")
        return cache_dir

    @field_validator("old_path")
    @classmethod
    def _check_old_path(cls, path: str | None) -> str | None:
        if path is not None:
            find("old_path", path)
        return path

    @model_validator(mode="after")
    def _check_chat(self) -> "DataConfig":
        if self.document_mask and getattr(self.source, "is_chat", False):
            cause = "separates documents at end-of-text tokens, which conversations contain"
            raise ValueError(f"data.document_mask=true {cause}; set it to false with data.format=chat")
        return self

    def loading(self) -> dict[str, Any]:
        """The arguments of `TextDataModule`."""
        return {name: value for name, value in vars(self).items() if name != "old_path"}

    def prepare(self) -> PreparedText | PreparedMixture:
        """The prepared text, see `data.mixture.prepare_source`."""
        budgets = {"token_budget": self.token_budget, "val_token_budget": self.val_token_budget}
        return prepare_source(self.source, self.tokenizer, self.cache_dir, **budgets)


def parse(mapping: Mapping[str, Any]) -> DataConfig:
    """Checks plain values and builds the settings from them.

    Args:
        mapping: `source` names the source. Keys of the source are on the same level as those of `DataConfig`.

    Raises:
        ValueError: an unknown key, for which the message has the nearest valid one; a missing key; or an invalid value.
        OSError: a file or folder that does not exist.
    """
    kind = mapping.get("source")
    if kind not in SOURCES:
        raise ValueError(f"data.source={kind} must be one of {', '.join(SOURCES)}")
    source = SOURCES[kind]
    _refuse_unknown("data.", mapping, DataConfig, source)
    values: dict[str, Any] = _select(mapping, DataConfig) | {"source": source(**_select(mapping, source))}
    if "tokenizer" in mapping:
        tokenizer = mapping["tokenizer"]
        if not isinstance(tokenizer, Mapping):
            raise ValueError(f"data.tokenizer={tokenizer} must be a group; use data.tokenizer.kind={tokenizer}")
        _refuse_unknown("data.tokenizer.", tokenizer, TokenizerConfig)
        values["tokenizer"] = TokenizerConfig(**tokenizer)
    return DataConfig(**values)


def _select(mapping: Mapping[str, Any], settings: type) -> dict[str, Any]:
    names = {field.name for field in fields(settings)}
    return {key: value for key, value in mapping.items() if key in names}


def _refuse_unknown(prefix: str, mapping: Mapping[str, Any], *groups: type) -> None:
    valid = [field.name for group in groups for field in fields(group)]
    for key in mapping:
        if key not in valid:
            near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
            remedy = f"did you mean {prefix}{near[0]}?" if near else f"valid are {', '.join(valid)}"
            raise ValueError(f"there is no setting {prefix}{key}; {remedy}")
