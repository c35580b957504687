"""The text of --help: what a program does, its config groups, and every key with the comment of its yaml file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

WIDTH = 120  # columns
KEY_WIDTH = 44  # of "key=value"
ADDED = ("ablation", "tune")  # groups that a grid adds, as +ablation=heads
QUOTED = r"""\s*(?:"(?:\\.|[^"\\])*"|'[^']*')\s*?"""
KEY_LINE = re.compile(rf"(?P<indent> *)['\"]?(?P<key>\w+)['\"]?:(?:{QUOTED}|.*?)(?P<comment>\s#\s?.*)?$")


def help_text(description: str, configs: Path, config_name: str, cfg: dict, choices: dict[str, str | None]) -> str:
    """The text, whose lines are at most `WIDTH` columns wide.

    Args:
        description: of the program, with examples.
        configs: the folder of the yaml files.
        cfg: the composed configuration, interpolations unresolved.
        choices: the chosen option of each config group; None: none.
    """
    main, files = configs / f"{config_name}.yaml", {}
    for group, choice in choices.items():
        files |= {group: list(_with_defaults(configs / group / f"{choice}.yaml"))} if choice else {}
    comments = key_comments(configs / "train.yaml") | key_comments(main)  # some programs repeat keys of a run
    for group, paths in files.items():
        for path in paths:
            comments |= {f"{group}.{key}": text for key, text in key_comments(path).items()}
    lines = [description.strip(), "", "Keys (key=value)", ""]
    for key, value in _leaves({key: value for key, value in cfg.items() if key != "hydra"}):
        if key.endswith("_target_") or isinstance(value, str) and value.startswith("${"):  # not for the command line
            continue
        if key in choices and value == {}:  # logger=csv
            continue
        lines += _entry(f"{key}={_typed(value)}", comments.get(key, ""))
    groups = [*reversed(choices), *(ADDED if config_name == "train" else ())]
    lines += ["", "Groups (group=choice); * is chosen"] if groups else []
    for group in groups:
        prefix = "+" if group in ADDED else ""
        lines.append("")
        for path in sorted((configs / group).glob("*.yaml")):
            mark = "*" if path.stem == choices.get(group) else " "
            lines += _entry(f"{mark} {prefix}{group}={path.stem}", _first_comment(path))
    return "\n".join(lines)


def key_comments(path: Path) -> dict[str, str]:
    """The comment behind each key of a yaml file, by dotted key. Lines below it at the same column continue it."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    column, last = -1, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            if last and line.index("#") == column:
                found[last] += " " + line.strip("# ")
            continue
        match = KEY_LINE.fullmatch(line)
        if match is None:
            last = ""
            continue
        indent = len(match["indent"])
        parents = [(depth, key) for depth, key in parents if depth < indent] + [(indent, match["key"])]
        last, column = ".".join(key for _, key in parents), match.start("comment") + 1 if match["comment"] else -1
        found[last] = (match["comment"] or "").strip("# ")
        last = last if match["comment"] else ""
    return {key: comment for key, comment in found.items() if comment}


def _with_defaults(path: Path) -> Iterator[Path]:
    """The yaml files that an option of a group consists of, its own last."""
    for name in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", ()):
        if isinstance(name, str) and name != "_self_":
            yield from _with_defaults(path.parent / f"{name}.yaml")
    yield path


def _first_comment(path: Path) -> str:
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("# @package"))
    comment: list[str] = []
    for line in lines:
        if not line.startswith("# ") or line.startswith("#  "):
            break
        comment.append(line.removeprefix("# "))
    return re.split(r"(?<=[.:])(?<!et al\.) ", " ".join(comment))[0].rstrip(":.")


def _leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed(value: object) -> str:
    """The value as on the command line."""
    text = value if isinstance(value, str) and value else json.dumps(value)
    return json.dumps(text)[1:-1] if "\n" in text else text


def _entry(name: str, comment: str) -> list[str]:
    """A line, and more where the comment is long."""
    lines, rest = [f"  {name:<{KEY_WIDTH}}"], comment.split()
    if len(lines[0]) > KEY_WIDTH + 2 and rest:
        lines.append(" " * (KEY_WIDTH + 2))
    while rest:
        if len(lines[-1]) + len(rest[0]) + 1 > WIDTH and lines[-1].strip():
            lines.append(" " * (KEY_WIDTH + 2))
        lines[-1] += f" {rest.pop(0)}"
    return [line.rstrip() for line in lines]
