"""The settings of a command line as they were typed, and as Hydra's grammar reads them."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PATHS = ("data.path", "data.val_path", "data.chat_template", "data.repo", "data.cache_dir")
FREE_TEXT = ("resume", "init_from", "debug", "hydra.run.dir", *PATHS, "callbacks.samples.prompt")  # of train.py


@dataclass(frozen=True)
class Override:
    """One setting of the command line.

    Attributes:
        text: for Hydra's parser.
        sign: "" and "+" set a value, "~" removes one.
        key: dotted; of a config group its name, as in "hydra/launcher".
        value: as typed, without quotes that Hydra's grammar would need.
        typed: the whole argument.
    """

    text: str
    sign: str
    key: str
    value: str
    typed: str = ""

    @property
    def is_group(self) -> bool:
        """Whether it may choose an option of a config group, or removes one."""
        return "." not in self.key

    def parsed(self) -> Any:
        """The value in Hydra's grammar: a number, a text, a list or a mapping."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        return OverridesParser.create().parse_override(self.text).value()


@dataclass(frozen=True)
class Typed:
    """The settings of a command line, in their order."""

    overrides: tuple[Override, ...] = ()

    @classmethod
    def of(cls, arguments: Iterable[str], free_text: Collection[str] = (), *, sweeps: bool = False) -> "Typed":
        """Reads key=value arguments.

        Args:
            free_text: keys whose value is a text, such as a path, that Hydra's grammar must not change; see `quoted`.
            sweeps: a comma separates the values of a grid, so no value is free text.
        """
        if sweeps:
            return cls(tuple(override(argument, always_set=False) for argument in arguments))
        return cls(tuple(override(argument, free_text) for argument in arguments))

    def __iter__(self) -> Iterator[Override]:
        return iter(self.overrides)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> str | None:
        """The value of a key as typed; None: it was not typed."""
        return self._values.get(key)

    @property
    def texts(self) -> list[str]:
        """For Hydra's parser."""
        return [override.text for override in self]

    def without(self, *keys: str) -> "Typed":
        """The settings of other keys."""
        return Typed(tuple(override for override in self if override.key not in keys))

    @cached_property
    def _values(self) -> dict[str, str]:
        return {override.key: override.value for override in self}


def override(argument: str, free_text: Collection[str] = (), *, always_set: bool = True) -> Override:
    """Reads one argument.

    Args:
        always_set: a dotted key is set whether or not a config file has it, since the settings are checked later. A key
            with + always is.
    """
    name, equals, value = argument.partition("=")
    sign, key = re.fullmatch(r"(\+\+|\+|~|)(.*)", name, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if sign == "~":
        return Override(argument, sign, key, value, argument)
    text = quoted(value) if key in free_text and equals else value
    is_setting = re.fullmatch(r"\w+(\.\w+)+", key) and equals and not key.startswith("hydra.")
    sets = "++" if is_setting and (always_set or sign) else sign
    return Override(f"{sets}{key}{equals}{text}", sign and "+", key, value, argument)


def quoted(text: str) -> str:
    """The text for Hydra's grammar, which would strip the space of `prompt=def ` and reject `prompt=print(x`.

    A value that needs the grammar (null, a list, a quoted text) stays unchanged.
    """
    if re.fullmatch(r"""null|\[.*\]|(["'])(\\.|(?!\1).)*\1""", text, re.DOTALL):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"
