"""The text of --help: what a command does, its settings with their values, and the options of its config groups."""

import itertools
import json
import re
import textwrap
from collections.abc import Collection, Mapping
from typing import Any

from pydantic.fields import FieldInfo

from tril.data.settings import extra_of, flatten, parts_of
from tril.scripts.cli.config import CONFIGS, options_of

WIDTH = 120  # columns
KEY_WIDTH = 44  # of "key=value"
COMMENT = re.compile(r"# \S")  # an indented one is an example


def help_text(
    description: str,
    settings: Mapping[str, FieldInfo],
    own: Collection[str],
    values: Mapping[str, Any],
    options: Mapping[str, str | None],
    *,
    every: bool,
) -> str:
    """The help of a command.

    Args:
        settings: that the command has, by dotted key.
        own: names of those that belong to the command alone, which are listed always.
        values: nested plain values of the settings.
        options: of each config group the chosen one; Hydra's own groups are left out.
        every: list all settings, and not only the command's own and the common ones of a run.
    """
    flat = flatten(values)
    settings = {key: each for key, each in settings.items() if key.partition(".")[0] in values}
    shown = {key: each for key, each in settings.items() if every or extra_of(each).get("common") or key in own}
    more = f"; --help=all lists all {len(settings)}" if len(shown) < len(settings) else ""
    lines = [description.strip(), "", f"Settings (key=value){more}", ""]
    for key, setting in shown.items():
        lines += entry_lines(f"{key}={as_typed(flat.get(key))}", help_of(setting))
    groups = [group for group in reversed([*options]) if not group.startswith("hydra/")]  # as in the yaml file
    if "experiment" in groups and "ablation" not in groups:
        groups.append("ablation")  # which a grid adds, as +ablation=heads
    lines += ["", "Groups (group=choice); * is chosen"] if groups else []
    for group in groups:
        lines.append("")
        for option in options_of(group):
            mark = f"{'*' if option == options.get(group) else ' '} {'+' if group == 'ablation' else ''}"
            lines += entry_lines(f"{mark}{group}={option}", first_comment(group, option))
    return "\n".join(lines)


def help_of(setting: FieldInfo) -> str:
    """The help of a setting, with its choices and what it needs."""
    help, needs = setting.description or "", extra_of(setting).get("needs")
    choices = [part for part in parts_of(setting.annotation) if not isinstance(part, type)]
    listed = " | ".join(map(as_typed, choices)) if any(isinstance(choice, str) for choice in choices) else ""
    shown = listed if listed not in help and "set by" not in help else ""
    return "; ".join(filter(None, [shown, help, f"with {needs}" if needs and needs not in help else ""]))


def first_comment(group: str, option: str) -> str:
    """The first sentence of the comment at the head of a yaml file."""
    text = (CONFIGS / group / f"{option}.yaml").read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    comment = " ".join(line.removeprefix("# ") for line in itertools.takewhile(COMMENT.match, text.splitlines()))
    return re.split(r"(?<=[.:])(?<!et al\.) ", comment)[0].rstrip(":.")


def as_typed(value: object) -> str:
    """The value as on the command line."""
    text = value if isinstance(value, str) and value else json.dumps(value)
    return json.dumps(text)[1:-1] if "\n" in text else text


def entry_lines(name: str, comment: str) -> list[str]:
    """A line, and more where the comment is long."""
    space = " " * (KEY_WIDTH + 3)
    wrapped = textwrap.wrap(comment, WIDTH, initial_indent=space, subsequent_indent=space)
    if wrapped and len(name) <= KEY_WIDTH:
        return [f"  {name:<{KEY_WIDTH}} {wrapped[0].strip()}", *wrapped[1:]]
    return [f"  {name}", *wrapped]
