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
BUDGETS = ("token_budget", "val_token_budget")


@plain_dataclass(frozen=True)
class Member:
    """A source of a mixture.

    Attributes:
        budgets: tokens of the training and of the validation part to prepare; None: all.
        count: its windows in a block of BLOCK training windows.
    """

    source: Source
    budgets: dict[Split, int | None]
    count: int


@dataclass(frozen=True, config=strict_settings("data"))
class Mixture:
    """Several texts, of which each gives a fixed share of the training tokens; their order has no effect.

    Args:
        sources: by name a weight; or settings of a source, as of `expand`, and its "weight".
    """

    sources: dict[Any, Any] | None = setting(
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
            ValueError: fewer than two sources, one of them twice, or an invalid name or weight.
            OSError: a path matches nothing.
        """
        settings = expand(self.sources or {}, {})
        if len(settings) < 2:
            shown = "{" + ", ".join(f"{name}: {values['weight']}" for name, values in settings.items()) + "}"
            raise ValueError(f"data.sources={shown} must have at least two sources, such as {EXAMPLE}")
        weights = {name: settings[name].pop("weight") for name in sorted(settings)}
        for name, weight in weights.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not math.isfinite(weight) or weight <= 0:
                needs = "must be a number above 0, such as 0.3"
                raise ValueError(f"data.sources: the weight {weight} of {printable(name)} {needs}; change it")
        members = {}
        for name, count in zip(weights, block_counts([*weights.values()]), strict=True):
            if count == 0:
                least = f"at least {0.5 / BLOCK:.2%} of the sum of all weights"
                raise ValueError(
                    f"data.sources: the weight {weights[name]} of {printable(name)} must be {least}; raise it"
                )
            budgets: dict[Split, int | None] = {
                "train": settings[name].pop("token_budget", None),
                "val": settings[name].pop("val_token_budget", None),
            }
            members[name] = Member(_source(name, settings[name]), budgets, count)
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
    expanded = {}
    for name, weight in sources.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"data.sources: the name {name!r} must be a text, such as in {EXAMPLE}")
        if isinstance(weight, Mapping):
            expanded[name] = {"weight": weight.get("weight"), **weight}
            continue
        if name in (Mixture.name, Files.name):
            raise ValueError(f"data.sources: {name} is no text; give the name of a source, or a path")
        settings = presets.get(name) or ({"source": name} if name in SOURCES else None)
        if settings is None:
            if not any(char in name for char in "*?[") and not Path(name).expanduser().exists():
                valid = {*presets, *SOURCES} - {Mixture.name, Files.name}
                remedy = nearest(name, valid).replace("; choose", "; give a path, or")
                raise ValueError(f"data.sources: {printable(name)} is no source and no path that exists{remedy}")
            settings = {"source": Files.name, "path": name}
        known = {"source", *BUDGETS, *SOURCES[settings["source"]].__pydantic_fields__}
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
    except ValidationError as error:
        raise ValueError(explain(error).replace("data.path=", "data.sources: ")) from error
    except OSError as error:
        raise OSError(str(error).replace("data.path=", "data.sources: ")) from error


def _check_different(sources: Mapping[str, Source]) -> None:
    """Raises ValueError if two sources share a file: the validation text of one could be training text of the other."""
    for (a, first), (b, second) in combinations(sources.items(), 2):
        names = f"{printable(a)} and {printable(b)}"
        if first == second:
            raise ValueError(f"data.sources: {names} are the same text; leave out one of them")
        if isinstance(first, Files) and isinstance(second, Files):
            files = ({path.resolve() for _, path in source.files("train")} for source in (first, second))
            if both := set.intersection(*files):
                raise ValueError(f"data.sources: {names} both contain {printable(min(both))}; leave it out of one")
