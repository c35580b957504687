"""What can be typed for a program, and what was typed."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import yaml

from tril.data.settings import Setting, declared
from tril.scripts.cli.config import CONFIGS, GROUPS, OPEN, TrainCommand, known_settings
from tril.scripts.cli.errors import UserError, command, unknown_setting

FOLDER = "hydra.run.dir"  # of a run
Own = TypeVar("Own")


@dataclass(frozen=True)
class Override:
    """One setting of the command line, `typed`. Sign: "" and "+" set the value of the dotted key, "~" removes it."""

    typed: str
    sign: str
    key: str
    value: str


@dataclass(frozen=True)
class Typed:
    """The settings of a command line, in their order."""

    overrides: tuple[Override, ...] = ()

    @classmethod
    def of(cls, arguments: Iterable[str]) -> "Typed":
        """Reads key=value arguments."""
        parts = [(argument, *re.findall(r"\A(~|\+{0,2})([^=]*)", argument)[0]) for argument in arguments]
        return cls(tuple(Override(text, sign[:1], key, text.partition("=")[2]) for text, sign, key in parts))

    def __iter__(self) -> Iterator[Override]:
        return iter(self.overrides)

    def __contains__(self, key: str) -> bool:
        return any(each.key == key for each in self)

    def get(self, key: str) -> str | None:
        """The value of a key as typed, the last one; None: it was not typed."""
        return next((each.value for each in reversed(self.overrides) if each.key == key), None)

    def chooses(self, group: str) -> bool:
        """Whether a group, or a setting of it, was typed."""
        return any(f"{each.key}.".startswith(f"{group}.") for each in self)

    def covers(self, key: str) -> bool:
        """Whether a setting was typed, alone or with its group."""
        return any(f"{key}.".startswith(f"{each.key}.") for each in self)

    def without(self, *keys: str) -> "Typed":
        """The settings of other keys."""
        return Typed(tuple(each for each in self if each.key not in keys))


@dataclass(frozen=True)
class Program:
    """What can be typed for a program.

    Attributes:
        own: the class that declares the program's own settings.
        groups: its config groups, and the option of each; None: none is chosen.
        of_a_run: it has all settings and groups of train.py too.
        unused: settings of its groups that have no effect: how their keys start.
    """

    name: str
    own: type
    groups: Mapping[str, str | None] = field(default_factory=dict)
    of_a_run: bool = False
    unused: tuple[str, ...] = ()

    @functools.cached_property
    def settings(self) -> dict[str, Setting]:
        """What can be set, by dotted key."""
        known = known_settings().items()
        shared = {key: each for key, each in known if self.of_a_run or key.partition(".")[0] in self.groups}
        shared = {key: each for key, each in shared.items() if not key.startswith(self.unused)}
        return {each.key: each for each in declared(self.own)} | shared

    @functools.cached_property
    def options(self) -> dict[str, str | None]:
        """The option of each config group, if none is typed; None: none."""
        if not self.of_a_run:
            return dict(self.groups)
        listed = yaml.safe_load((CONFIGS / f"{self.name}.yaml").read_text(encoding="utf-8"))["defaults"]
        chosen = [entry for entry in listed if isinstance(entry, dict)]
        return {group: name for each in chosen for group, name in each.items() if not group.startswith("override ")}

    @functools.cached_property
    def names(self) -> list[str]:
        """What can be typed: settings, groups of settings, and config groups."""
        names = [*self.settings, *self.groups]
        if self.of_a_run:
            names += [FOLDER]
            names += [f"{group}.{name}" for group in OPEN for name in GROUPS[group].__pydantic_fields__]
            names += sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
        parents = {key[: dot.start()] for key in self.settings for dot in re.finditer(r"\.", key)}
        return list(dict.fromkeys([*names, *sorted(parents)]))

    def check(self, typed: Typed) -> None:
        """Raises UserError for a key that does not exist, or that cannot be removed."""
        for each in typed:
            if each.key.startswith(self.unused):
                raise UserError(f"{each.typed} has no effect on {self.name}; leave it out")
            first, _, rest = each.key.partition(".")
            is_open = first in OPEN and rest and self.of_a_run  # callbacks.mine._target_ adds one
            adds = is_open and rest.partition(".")[0] not in GROUPS[first].__pydantic_fields__
            of_hydra = self.of_a_run and re.match(r"hydra[./]", each.key)
            of_ablation = "ablation" in typed and not rest  # its yaml file may add settings
            if not (each.key in self.names or of_hydra or adds or of_ablation):
                raise UserError(unknown_setting(each.key, self.names))
            if each.sign == "~" and not (of_hydra or is_open):
                remedy = f"leave out ~{each.key}, or set {each.key}=VALUE"
                raise UserError(f"{each.key} is required, only single callbacks and loggers can be removed; {remedy}")


@dataclass(frozen=True)
class CommandLine(Generic[Own]):
    """A command line, read and composed.

    Attributes:
        own: the settings that the program declares, checked.
        settings: all others, those of its config groups and of a run, as nested plain values.
        choices: the option of each config group; None: none.
        grid: the values of an ablation, by key.
    """

    typed: Typed
    own: Own
    settings: dict[str, Any]
    choices: dict[str, str | None]
    grid: dict[str, str]

    def check_single(self) -> None:
        """Raises UserError if a single run has what belongs to a grid, such as an ablation without -m."""
        if self.grid and not any(key in self.typed for key in self.grid):
            remedy = f"run it with {command('train')} -m, or choose a value, such as {next(iter(self.grid))}=..."
            raise UserError(f"the ablation is a grid over {', '.join(self.grid)}; {remedy}")
        for each in self.typed:
            if each.key.partition(".")[0] == "sweep":
                raise UserError(f"{each.typed} has no effect on a single run; leave it out, or add -m")


PROGRAMS = {"train": Program("train", TrainCommand, of_a_run=True)}
