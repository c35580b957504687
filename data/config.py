"""The settings below `data:`, checked before anything expensive starts."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, group, nearest, setting, strict_settings
from tril.data.sources import SOURCES
from tril.data.sources.base import Split
from tril.data.tokenizer import TokenizerConfig

if TYPE_CHECKING:
    from tril.data.prepare import PreparedText

MIN_LENGTH = 128  # of windows that double; shorter ones at first gave a higher loss (docs/log.md)
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True, config=strict_settings("data"))
class DataConfig:
    """The settings below `data:` that every source has."""

    source: Any = setting(..., "the text, an object of one of SOURCES; set by data=NAME")
    tokenizer: TokenizerConfig = group(TokenizerConfig, "text <-> token ids")
    batch_size: int = setting(4, "windows of context_length tokens per device and step", common=True, ge=1)
    double_length_at: Annotated[tuple[Fraction, ...], Field(strict=False)] = setting(  # not strict: yaml has lists
        (0.3, 0.7), "fractions of the run where windows double in length, up to context_length; []: never", common=True
    )
    val_batch_size: Count | None = setting(None, "windows per device in validation; null: batch_size")
    cache_dir: str | None = setting(None, "null: $TRIL_CACHE, else $XDG_CACHE_HOME/tril, else ~/.cache/tril")
    token_budget: Count | None = setting(None, "training tokens to prepare; null: all")
    val_token_budget: Count | None = setting(None, "validation tokens to prepare, likewise")
    document_mask: bool = setting(
        False, "true: documents in a window do not attend to each other; positions restart in each", common=True
    )

    @field_validator("double_length_at")
    @classmethod
    def _check_order(cls, fractions: tuple[float, ...]) -> tuple[float, ...]:
        if list(fractions) != sorted(set(fractions)):
            raise ValueError(f"data.double_length_at={[*fractions]} must rise, such as [0.3,0.7]")
        return fractions

    @field_validator("cache_dir")
    @classmethod
    def _check_cache_dir(cls, cache_dir: str | None) -> str | None:
        if cache_dir and Path(cache_dir).expanduser().is_file():
            raise ValueError(f"data.cache_dir={cache_dir} is a file; give a folder")
        return cache_dir

    def window_lengths(self, context_length: int) -> dict[int, float]:
        """The lengths of training windows, in the order of training, each with the fraction of the run where it ends.

        Short sequences first: Press, Smith and Lewis, 2021, https://arxiv.org/abs/2012.15832. The first doublings are
        left out where the length before them would not be whole, or below MIN_LENGTH.
        """
        lengths = {context_length: 1.0}
        for end in reversed(self.double_length_at):
            length = min(lengths)
            if length % 2 or length < 2 * MIN_LENGTH:
                break
            lengths[length // 2] = end
        return dict(sorted(lengths.items()))

    def prepare(self) -> "PreparedText":
        """See `prepare.prepare`."""
        from tril.data.prepare import prepare

        budgets: dict[Split, int | None] = {"train": self.token_budget, "val": self.val_token_budget}
        return prepare(self.source, self.tokenizer, budgets, self.cache_dir)


def parse(mapping: Mapping[str, Any]) -> DataConfig:
    """Checks plain values and builds the settings from them.

    Args:
        mapping: `source` names the source. Keys of the source are on the same level as those of `DataConfig`.

    Raises:
        ValueError: an unknown key, for which the message has the nearest valid one; a missing key; or an invalid value.
        OSError: a file or folder that does not exist.
    """
    kind = SOURCES.get(str(mapping.get("source")))  # a list has no hash
    if kind is None:
        raise ValueError(f"data.source={mapping.get('source')} must be one of {', '.join(SOURCES)}")
    common, known = {field.name for field in fields(DataConfig)}, {field.name for field in fields(kind)}
    for key in mapping:
        if key not in common and key not in known:
            raise ValueError(f"there is no setting data.{key}{nearest(str(key), {*common, *known}, 'data')}")
    source = build(kind, {key: value for key, value in mapping.items() if key in known}, "data")
    return build(DataConfig, {key: mapping[key] for key in mapping if key in common} | {"source": source}, "data")
