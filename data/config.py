"""The settings below `data:`, checked before anything expensive starts. A single text is a mixture of one."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, group, nearest, printable, setting, strict_settings
from tril.data.sources import SOURCES as SINGLE
from tril.data.sources.base import BLOCK, Member, Source, Split
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig

if TYPE_CHECKING:
    from tril.data.prepared import PreparedTexts

EXAMPLE = "data.sources={stdlib: 0.7, notes/*.md: 0.3}"
BUDGETS: dict[Split, str] = {"train": "token_budget", "val": "val_token_budget"}
MIN_LENGTH = 128  # of windows that double; shorter ones at first gave a higher loss (docs/log.md)
Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Presets = Mapping[str, Mapping[str, Any]]  # by name the settings of a data group


@dataclass(frozen=True, config=strict_settings("data"))
class Mixture:
    """Several texts, of which each gives a fixed share of the training tokens; their order has no effect.

    Args:
        sources: by name the settings of a source and its "weight"; `parse` makes them of names and weights.
    """

    sources: dict[str, dict[str, Any]] | None = setting(
        None, "weights, of any sum: NAME of another data=NAME (with its settings), path or glob: weight", common=True
    )
    name = "mixture"

    @cached_property
    def members(self) -> dict[str, Member]:
        """The sources by name, sorted.

        Raises:
            ValueError: fewer than two sources, two with the same file, or an invalid source or weight.
            OSError: a path matches nothing.
        """
        settings = {name: dict(values) for name, values in sorted((self.sources or {}).items())}
        weights = {name: values.pop("weight", None) for name, values in settings.items()}
        if len(weights) < 2:
            raise ValueError(f"data.sources={weights} must have at least two sources, such as {EXAMPLE}")
        is_number = all(type(x) in (int, float) and 0 < x < math.inf for x in weights.values())
        counts = block_counts([*weights.values()]) if is_number else [0]
        if 0 in counts:
            limit = f"must be numbers above 0, each at least {0.5 / BLOCK:.2%} of their sum"
            raise ValueError(f"data.sources={weights} {limit}, such as {EXAMPLE}")
        members = {}
        for (name, values), count in zip(settings.items(), counts, strict=True):
            budgets: dict[Split, int | None] = {split: values.pop(key, None) for split, key in BUDGETS.items()}
            members[name] = Member(build_source(SINGLE, values), budgets, count)
        refuse_shared_files({name: member.source for name, member in members.items()})
        return members

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source in the training windows."""
        return {name: member.count / BLOCK for name, member in self.members.items()}


SOURCES: dict[str, type] = SINGLE | {Mixture.name: Mixture}


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
    token_budget: Count | None = setting(None, "training tokens to prepare, of a mixture from each source; null: all")
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

    @property
    def members(self) -> dict[str, Member]:
        """The sources by name with their shares and budgets; a single one has the name ""."""
        members = self.source.members if isinstance(self.source, Mixture) else {"": Member(self.source, {})}
        typed: dict[Split, int | None] = {"train": self.token_budget, "val": self.val_token_budget}
        return {
            name: replace(member, budgets={split: typed[split] or member.budgets.get(split) for split in typed})
            for name, member in members.items()
        }

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

    def prepare(self) -> "PreparedTexts":
        """See `prepare.prepare`."""
        from tril.data.prepare import prepare

        return prepare(self.members, self.tokenizer, self.cache_dir)


def parse(mapping: Mapping[str, Any], presets: Presets | None = None) -> DataConfig:
    """Checks plain values and builds the settings from them.

    Args:
        mapping: `source` names the source. Keys of the source are on the same level as those of `DataConfig`.
        presets: the data groups that a mixture may name.

    Raises:
        ValueError: an unknown key, for which the message has the nearest valid one; a missing key; or an invalid value.
        OSError: a file or folder that does not exist.
    """
    common, known = {field.name for field in fields(DataConfig)}, set()
    if (group := SOURCES.get(str(mapping.get("source")))) is not None:
        known = {field.name for field in fields(group)}
        for key in mapping:
            if key not in common and key not in known:
                raise ValueError(f"there is no setting data.{key}{nearest(str(key), {*common, *known}, 'data')}")
    values = {key: value for key, value in mapping.items() if key in known} | {"source": mapping.get("source")}
    if group is Mixture and isinstance(sources := values.get("sources"), Mapping):
        values["sources"] = expand(sources, presets or {})
    source = build_source(SOURCES, values)
    config = build(DataConfig, {key: mapping[key] for key in mapping if key in common} | {"source": source}, "data")
    _ = config.members  # raises for a wrong mixture
    return config


def build_source(kinds: Mapping[str, type], values: dict[str, Any]) -> Any:
    """The source of some settings, of which "source" is the kind."""
    kind = str(values.pop("source", None))  # a list has no hash
    if kind not in kinds:
        raise ValueError(f"data.source={kind} must be one of {', '.join(kinds)}")
    return build(kinds[kind], values, "data")


def expand(sources: Mapping[Any, Any], presets: Presets) -> dict[str, dict[str, Any]]:
    """The settings of the sources of a mixture.

    Args:
        sources: by name a weight, or what this function returns. A name of a data group or of a source stands for that
            text with its settings; any other name is a path.

    Raises:
        ValueError: a name that is none of these.
    """
    groups = {name: {"source": name} for name in SINGLE} | dict(presets)
    groups = {name: values for name, values in groups.items() if name not in (Mixture.name, Files.name)}
    expanded = {}
    for name, weight in ((str(name), weight) for name, weight in sources.items()):
        if isinstance(weight, Mapping):
            expanded[name] = dict(weight)
            continue
        if name not in groups and not any(char in name for char in "*?[") and not Path(name).expanduser().exists():
            remedy = nearest(name, groups).replace("; choose", "; give a path, or")
            raise ValueError(f"data.sources: {printable(name)} is no source and no path that exists{remedy}")
        settings = groups.get(name) or {"source": Files.name, "path": name}
        known = {"source", *BUDGETS.values(), *SINGLE[settings["source"]].__pydantic_fields__}
        expanded[name] = {"weight": weight, **{key: value for key, value in settings.items() if key in known}}
    return expanded


def block_counts(weights: list[float]) -> list[int]:
    """Windows of each source in a block: in proportion to the weights, by largest remainder."""
    import numpy as np

    relative = np.array(weights, float) / max(weights)  # a sum of the weights themselves could overflow
    exact = relative / relative.sum() * BLOCK
    counts = np.floor(exact).astype(int)
    by_remainder = np.argsort(counts - exact, kind="stable")  # the largest remainder first
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    return counts.tolist()


def refuse_shared_files(sources: Mapping[str, Source]) -> None:
    """Raises ValueError if two sources share a file: the validation text of one could be training text of the other."""
    files = {
        name: {path.resolve() for _, path in source.files["train"]}
        for name, source in sources.items()
        if isinstance(source, Files)
    }
    for first, second in combinations(files, 2):
        if both := files[first] & files[second]:
            cause = f"{printable(first)} and {printable(second)} both contain {printable(min(both))}"
            raise ValueError(f"data.sources: {cause}; leave it out of one")
