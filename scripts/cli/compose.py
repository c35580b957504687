"""The settings of a program: its defaults with what was typed. Hydra, whose import takes a quarter of a second, is used
only where a config group is chosen."""

import contextlib
import re
from dataclasses import replace
from typing import Any

from tril.data.settings import build, defaults
from tril.scripts.cli.command_line import PROGRAMS, CommandLine, Typed
from tril.scripts.cli.config import refuse_without_effect
from tril.scripts.cli.errors import UserError, user_errors

QUOTED = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
ITEM = rf"""\s*(?:{QUOTED}|[^,=\[\]{{}}'"]+)\s*"""  # of a list


def compose(name: str, typed: Typed) -> CommandLine[Any]:
    """The settings of a program with what was typed.

    Raises:
        UserError: a wrong setting, in one line.
    """
    line = compose_values(name, typed)
    kind = PROGRAMS[name].own
    with user_errors():
        own = build(kind, {key: line.settings.pop(key) for key in kind.__pydantic_fields__})
        refuse_without_effect([("", own)], typed)  # pyright: ignore[reportArgumentType] one class, found under two names
    return replace(line, own=own)


def compose_values(name: str, typed: Typed) -> CommandLine[None]:
    """The same, without checking values; `settings` has all of them."""
    program = PROGRAMS[name]
    program.check(typed)
    if program.of_a_run or any(option or typed.chooses(group) for group, option in program.groups.items()):
        from tril.scripts.cli.hydra_config import compose_groups

        return compose_groups(program, typed)
    values = {each.key: read_value(each.value, is_text=program.settings[each.key].is_text) for each in typed}
    return CommandLine(typed, None, {**defaults(program.own), **dict.fromkeys(program.groups), **values}, {}, {})


def read_value(typed: str, *, is_text: bool) -> Any:
    """A value as Hydra reads it: null, a list in brackets, a text in quotes, a number, true or false, or else a text.

    Args:
        is_text: the setting is a text, which needs no quotes and is not read as a number.

    Raises:
        UserError: the items of a list cannot be told apart.
    """
    word = typed.strip()
    if typed == "null":
        return None
    if re.fullmatch(QUOTED, typed, re.DOTALL):  # backslashes before a quote and at the end are escapes
        escaped = rf"(\\+)({typed[0]}|\Z)"
        return re.sub(escaped, lambda match: match[1][: len(match[1]) // 2] + match[2], typed[1:-1])
    if typed.startswith("[") and typed.endswith("]"):
        items = typed[1:-1]
        if items.strip() and not re.fullmatch(f"{ITEM}(?:,{ITEM})*", items, re.DOTALL):
            raise UserError(f"cannot read {typed!r}; put quotes around each text of the list")
        return [read_value(item.strip(), is_text=False) for item in re.findall(ITEM, items, re.DOTALL)]
    if is_text:
        return typed
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return typed
