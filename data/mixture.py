"""Several texts in fixed shares: which ones. A single text is a mixture of one, see `data.config.DataConfig`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import build, explain, nearest, setting, strict_settings
from tril.data.sources import SOURCES
from tril.data.sources.base import Source, Split, printable
from tril.data.sources.files import Files

BLOCK = 1000  # training windows in which the shares are exact
EXAMPLE = "data.sources={stdlib: 0.7, notes/*.md: 0.3}"
BUDGETS: dict[Split, str] = {"train": "token_budget", "val": "val_token_budget"}


@plain_dataclass(frozen=True)
class Member:
    """A source of a mixture.

    Attributes:
        budgets: tokens of the training and of the validation part to prepare; None: all.
        count: its windows in a block of BLOCK training windows.
    """

    source: Source
    budgets: Mapping[Split, int | None]
    count: int = BLOCK


@dataclass(frozen=True, config=strict_settings("data"))
class Mixture:
    """Several texts, of which each gives a fixed share of the training tokens; their order has no effect.

    Args:
        sources: by name a weight; or settings of a source, as of `expand`, and its "weight".
    """

    sources: dict[str, Any] | None = setting(
        None, "weights, of any sum: NAME of another data=NAME (with its settings), path or glob: weight"
    )
    name = "mixture"

    @model_validator(mode="after")
    def _check_sources(self) -> "Mixture":
        self.members  # noqa: B018 raises
        return self

    @cached_property
    def members(self) -> dict[str, Member]:
        """The sources by name, sorted.

        Raises:
            ValueError: fewer than two sources, two with the same file, or an invalid name or weight.
            OSError: a path matches nothing.
        """
        settings = dict(sorted(expand(self.sources or {}, {}).items()))
        weights = {name: values.pop("weight") for name, values in settings.items()}
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
            members[name] = Member(_source(name, values), budgets, count)
        _check_different({name: member.source for name, member in members.items()})
        return members

    @property
    def shares(self) -> dict[str, float]:
        """The share of each source in the training windows."""
        return {name: member.count / BLOCK for name, member in self.members.items()}


def expand(sources: Mapping[Any, Any], presets: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The settings of the sources of a mixture.

    Args:
        sources: by name a weight, or what this function returns.
        presets: by name the settings of a data group. A name of `SOURCES` is that source with its defaults; any other
            name is a path.

    Raises:
        ValueError: a name that is none of these.
    """
    groups = {name: {"source": name} for name in SOURCES} | dict(presets)
    groups = {name: values for name, values in groups.items() if name not in (Mixture.name, Files.name)}
    expanded = {}
    for name, weight in ((str(name), weight) for name, weight in sources.items()):
        if isinstance(weight, Mapping):
            expanded[name] = {"weight": None, **weight}
            continue
        if name not in groups and not any(char in name for char in "*?[") and not Path(name).expanduser().exists():
            remedy = nearest(name, groups).replace("; choose", "; give a path, or")
            raise ValueError(f"data.sources: {printable(name)} is no source and no path that exists{remedy}")
        settings = groups.get(name) or {"source": Files.name, "path": name}
        known = {"source", *BUDGETS.values(), *SOURCES[settings["source"]].__pydantic_fields__}
        expanded[name] = {"weight": weight, **{key: value for key, value in settings.items() if key in known}}
    return expanded


def block_counts(weights: list[float]) -> list[int]:
    """Windows of each source in a block: in proportion to the weights, by largest remainder."""
    relative = np.array(weights, float) / max(weights)  # a sum of the weights themselves could overflow
    exact = relative / relative.sum() * BLOCK
    counts = np.floor(exact).astype(int)
    by_remainder = np.argsort(counts - exact, kind="stable")  # the largest remainder first
    counts[by_remainder[: BLOCK - counts.sum()]] += 1
    return counts.tolist()


def _source(name: str, settings: dict[str, Any]) -> Source:
    """A source whose errors name the mixture."""
    kind = settings.pop("source", None)
    if kind not in SOURCES:
        raise ValueError(f"data.sources: source={kind} of {printable(name)} must be one of {', '.join(SOURCES)}")
    try:
        return build(SOURCES[kind], settings, "data")
    except (ValidationError, OSError) as error:
        message = explain(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(message.replace("data.path=", "data.sources: ")) from error


def _check_different(sources: Mapping[str, Source]) -> None:
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
