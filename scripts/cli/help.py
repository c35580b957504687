"""The text of --help: what a program does, its settings with their defaults, and the options of its config groups."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tril.data.settings import Setting, declared
from tril.scripts.cli.compose import CONFIGS, compose
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
    known = settings_by_key(settings)
    comments = key_comments(CONFIGS / "train.yaml") | key_comments(CONFIGS / f"{config_name}.yaml")
    lines = [description.strip(), "", "Settings (key=value)", ""]
    for key, value in leaves(settings):
        if key in known:
            lines += entry_lines(f"{key}={as_typed(value)}", help_of(known[key]))
        elif key not in groups or value != {}:
            lines += entry_lines(f"{key}={as_typed(value)}", comments.get(key, ""))
    lines += ["", "Groups (group=choice); * is chosen"] if groups else []
    for group in [*reversed(list(groups)), *(ADDED if config_name == "train" else ())]:
        prefix = "+" if group in ADDED else ""
        lines.append("")
        for path in sorted((CONFIGS / group).glob("*.yaml")):
            mark = "*" if path.stem == groups.get(group) else " "
            lines += entry_lines(f"{mark} {prefix}{group}={path.stem}", first_comment(path))
    return lines


def settings_by_key(settings: Mapping[str, Any]) -> dict[str, Setting]:
    """What the groups of a run declare, by dotted key."""
    from tril.data.config import SOURCES, DataConfig
    from tril.model.training.settings import TopLevelConfig
    from tril.scripts.cli.config import GROUPS

    source = SOURCES.get(str((settings.get("data") or {}).get("source")))
    groups = [("", TopLevelConfig), ("data", DataConfig), ("data", source), *GROUPS.items()]
    return {each.key: each for prefix, group in groups if group for each in declared(group, prefix)}


def help_of(setting: Setting) -> str:
    """The help of a setting, with its choices and what it needs."""
    named = [choice for choice in setting.choices if isinstance(choice, str)]
    choices = " | ".join(as_typed(choice) for choice in setting.choices)
    listed = named and choices not in setting.help and "set by" not in setting.help
    parts = [choices if listed else "", setting.help]
    needs = f"with {setting.needs}" if setting.needs and setting.needs not in setting.help else ""
    return "; ".join(filter(None, [*parts, needs]))


def key_comments(path: Path) -> dict[str, str]:
    """The comment behind each key of a flat yaml file; indented comments below it continue it."""
    found: dict[str, str] = {}
    last = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(" ") and line.strip().startswith("#") and last:
            found[last] += " " + line.strip("# ")
        elif match := re.match(r"(\w+):.*?\s#\s?(.*)$", line):
            last = match[1]
            found[last] = match[2]
        else:
            last = ""
    return found


def first_comment(path: Path) -> str:
    """The first sentence of the comment at the head of a yaml file."""
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package"))
    comment: list[str] = []
    for line in lines:
        if not line.startswith("# ") or line.startswith("#  "):
            break
        comment.append(line.removeprefix("# "))
    return re.split(r"(?<=[.:])(?<!et al\.) ", " ".join(comment))[0].rstrip(":.")


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def as_typed(value: object) -> str:
    """The value as on the command line."""
    text = value if isinstance(value, str) and value else json.dumps(value)
    return json.dumps(text)[1:-1] if "\n" in text else text


def entry_lines(name: str, comment: str) -> list[str]:
    """A line, and more where the comment is long."""
    lines, rest = [f"  {name:<{KEY_WIDTH}}"], comment.split()
    if len(lines[0]) > KEY_WIDTH + 2 and rest:
        lines.append(" " * (KEY_WIDTH + 2))
    while rest:
        if len(lines[-1]) + len(rest[0]) + 1 > WIDTH and lines[-1].strip():
            lines.append(" " * (KEY_WIDTH + 2))
        lines[-1] += f" {rest.pop(0)}"
    return [line.rstrip() for line in lines]
