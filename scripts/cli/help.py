"""The text of --help: what a program does, its settings with their defaults, and the options of its config groups."""

import json
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tril.data.settings import Setting, declared
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import COMMANDS, CONFIGS, flatten, known_settings
from tril.scripts.cli.typed import Typed

WIDTH = 120  # columns
KEY_WIDTH = 44  # of "key=value"
ADDED = ("ablation", "tune")  # groups that a grid adds, as +ablation=heads


def print_help(config_name: str, description: str, typed: Typed) -> None:
    """Prints the help for the settings that are typed with --help, such as those of model=small."""
    composed = compose(config_name, typed.without("resume"))
    groups = {name: choice for name, choice in composed.choices.items() if (CONFIGS / name).is_dir()}
    print("\n".join(help_lines(description, config_name, composed.settings, groups)), flush=True)


def help_lines(
    description: str, config_name: str, settings: Mapping[str, Any], groups: Mapping[str, str | None]
) -> list[str]:
    """The lines, which are at most WIDTH columns wide.

    Args:
        description: of the program, with examples.
        settings: composed, as nested plain values.
        groups: the chosen option of each config group; None: none.
    """
    known, comments = known_settings(), key_comments(CONFIGS / f"{config_name}.yaml")
    if config_name in COMMANDS:
        known |= {each.key: each for each in declared(COMMANDS[config_name])}
    lines = [description.strip(), "", "Settings (key=value)", ""]
    for key, value in flatten(settings).items():
        if key in known or key not in groups or value != {}:
            comment = help_of(known[key]) if key in known else comments.get(key, "")
            lines += entry_lines(f"{key}={as_typed(value)}", comment)
    lines += ["", "Groups (group=choice); * is chosen"] if groups else []
    for group in [*reversed(list(groups)), *(ADDED if config_name == "train" else ())]:
        prefix = "+" if group in ADDED else ""
        lines.append("")
        for path in sorted((CONFIGS / group).glob("*.yaml")):
            mark = "*" if path.stem == groups.get(group) else " "
            lines += entry_lines(f"{mark} {prefix}{group}={path.stem}", first_comment(path))
    return lines


def help_of(setting: Setting) -> str:
    """The help of a setting, with its choices and what it needs."""
    choices = " | ".join(as_typed(choice) for choice in setting.choices)
    listed = any(isinstance(choice, str) for choice in setting.choices) and "set by" not in setting.help
    needs = f"with {setting.needs}" if setting.needs and setting.needs not in setting.help else ""
    return "; ".join(filter(None, [choices if listed and choices not in setting.help else "", setting.help, needs]))


def key_comments(path: Path) -> dict[str, str]:
    """The comment behind each key of a flat yaml file; indented comments below it continue it."""
    text = re.sub(r"\n\s+#", "", path.read_text(encoding="utf-8"))
    return {match[1]: match[2] for match in re.finditer(r"^(\w+):.*?\s#\s?(.*)$", text, re.MULTILINE)}


def first_comment(path: Path) -> str:
    """The first sentence of the comment at the head of a yaml file."""
    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    comment = re.match(r"(?:# \S.*\n)*", text)[0].replace("\n# ", " ").removeprefix("# ").strip()  # pyright: ignore[reportOptionalSubscript]
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
