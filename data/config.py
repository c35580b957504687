"""The settings below `data:`, checked before anything expensive starts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from tril.data.mixture import Member, Mixture, expand
from tril.data.prepare import prepare
from tril.data.prepared import PreparedTexts
from tril.data.settings import build, nearest, setting, strict_settings
from tril.data.sources import SOURCES as SINGLE
from tril.data.sources.base import Split
from tril.data.tokenizer import TokenizerConfig

SOURCES: dict[str, type] = SINGLE | {Mixture.name: Mixture}
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, config=strict_settings("data"))
class DataConfig:
    """The settings below `data:` that every source has."""

    source: Any = setting(..., "the text, an object of one of SOURCES; set by data=NAME")
    tokenizer: TokenizerConfig = setting(TokenizerConfig(), "text <-> token ids")
    batch_size: int = setting(8, "windows per device and step", ge=1)
    val_batch_size: Count | None = setting(None, "windows per device in validation; null: batch_size")
    cache_dir: str | None = setting(
        None, "null: $TRIL_CACHE, else $XDG_CACHE_HOME/tril, else ~/.cache/tril", typed_only=True
    )
    token_budget: Count | None = setting(None, "training tokens to prepare, of a mixture from each source; null: all")
    val_token_budget: Count | None = setting(None, "validation tokens to prepare, likewise")
    document_mask: bool = setting(
        False, "true: documents in a window do not attend to each other; positions restart in each"
    )

    @field_validator("cache_dir")
    @classmethod
    def _check_cache_dir(cls, cache_dir: str | None) -> str | None:
        if cache_dir and Path(cache_dir).expanduser().is_file():
            raise ValueError(f"data.cache_dir={cache_dir} is a file; give a folder")
        return cache_dir

    @model_validator(mode="after")
    def _check_chat(self) -> "DataConfig":
        if self.document_mask and any(member.source.is_chat for member in self.members.values()):
            cause = "separates documents at end-of-text tokens, which conversations contain"
            raise ValueError(f"data.document_mask=true {cause}; set it to false with data.format=chat")
        return self

    @property
    def members(self) -> dict[str, Member]:
        """The sources by name with their shares and budgets; a single one has the name ""."""
        members = self.source.members if isinstance(self.source, Mixture) else {"": Member(self.source, {})}
        typed: dict[Split, int | None] = {"train": self.token_budget, "val": self.val_token_budget}
        return {
            name: replace(member, budgets={split: typed[split] or member.budgets.get(split) for split in typed})
            for name, member in members.items()
        }

    def prepare(self) -> PreparedTexts:
        """See `prepare.prepare`."""
        return prepare(self.members, self.tokenizer, self.cache_dir)


def parse(mapping: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]] | None = None) -> DataConfig:
    """Checks plain values and builds the settings from them.

    Args:
        mapping: `source` names the source. Keys of the source are on the same level as those of `DataConfig`.
        presets: by name the settings of the data groups that a mixture may name, see `mixture.expand`.

    Raises:
        ValueError: an unknown key, for which the message has the nearest valid one; a missing key; or an invalid value.
        OSError: a file or folder that does not exist.
    """
    kind = mapping.get("source")
    if kind not in SOURCES:
        raise ValueError(f"data.source={kind} must be one of {', '.join(SOURCES)}")
    groups: tuple[type, type] = DataConfig, SOURCES[kind]
    common, own = (group.__pydantic_fields__ for group in groups)
    for key in mapping:
        if key not in common and key not in own:
            raise ValueError(f"there is no setting data.{key}{nearest(str(key), {*common, *own}, 'data')}")
    values = {key: value for key, value in mapping.items() if key in own}
    if kind == Mixture.name and isinstance(values.get("sources"), Mapping):
        values["sources"] = expand(values["sources"], presets or {})
    source = build(SOURCES[kind], values, "data")
    return build(DataConfig, {key: mapping[key] for key in mapping if key in common} | {"source": source}, "data")
