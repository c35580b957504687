"""The settings of a command line as they were typed, and as Hydra's grammar reads them."""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

PATHS = ("data.path", "data.val_path", "data.chat_template", "data.repo", "data.cache_dir")
FREE_TEXT = ("resume", "init_from", "debug", "hydra.run.dir", *PATHS, "callbacks.samples.prompt")  # of train.py


@dataclass(frozen=True)
class Override:
    """One setting of the command line.

    Attributes:
        typed: the whole argument.
        sign: "" and "+" set a value, "~" removes one.
        key: dotted; of a config group its name, as in "hydra/launcher".
        value: as typed.
        text: for Hydra's parser.
    """

    typed: str
    sign: str
    key: str
    value: str
    text: str

    @classmethod
    def of(cls, argument: str, free_text: Collection[str] | None = ()) -> "Override":
        """Reads one argument; see `Typed.of`."""
        name, equals, value = argument.partition("=")
        sign, key = re.fullmatch(r"(\+\+|\+|~|)(.*)", name, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
        if sign == "~":
            return cls(argument, sign, key, value, argument)
        # A dotted key is set whether or not a config file has it, since the settings are checked later.
        is_setting = re.fullmatch(r"\w+(\.\w+)+", key) and equals and not key.startswith("hydra.")
        sets = "++" if is_setting and (free_text is not None or sign) else sign
        text = quoted(value) if key in (free_text or ()) and equals else value
        return cls(argument, sign and "+", key, value, f"{sets}{key}{equals}{text}")

    @property
    def is_group(self) -> bool:
        """Whether it may choose an option of a config group, or removes one."""
        return "." not in self.key


@dataclass(frozen=True)
class Typed:
    """The settings of a command line, in their order."""

    overrides: tuple[Override, ...] = ()

    @classmethod
    def of(cls, arguments: Iterable[str], free_text: Collection[str] | None = ()) -> "Typed":
        """Reads key=value arguments.

        Args:
            free_text: keys whose value is a text, such as a path, that Hydra's grammar must not change; see `quoted`.
                None: the arguments of a grid, in which a comma separates values.
        """
        return cls(tuple(Override.of(argument, free_text) for argument in arguments))

    def __iter__(self) -> Iterator[Override]:
        return iter(self.overrides)

    def __contains__(self, key: str) -> bool:
        return any(each.key == key for each in self)

    def get(self, key: str) -> str | None:
        """The value of a key as typed, the last one; None: it was not typed."""
        return next((each.value for each in reversed(self.overrides) if each.key == key), None)

    def covers(self, key: str) -> bool:
        """Whether a setting was typed, alone or with its group."""
        return any(f"{key}.".startswith(f"{each.key}.") for each in self)

    @property
    def texts(self) -> list[str]:
        """For Hydra's parser."""
        return [override.text for override in self]

    def without(self, *keys: str) -> "Typed":
        """The settings of other keys."""
        return Typed(tuple(override for override in self if override.key not in keys))


def quoted(text: str) -> str:
    """The text for Hydra's grammar, which would strip the space of `prompt=def ` and reject `prompt=print(x`.

    A value that needs the grammar (null, a list, a quoted text) stays unchanged.
    """
    if re.fullmatch(r"""null|\[.*\]|(["'])(\\.|(?!\1).)*\1""", text, re.DOTALL):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text)  # the quotes go on
    return f"'{text}'"
