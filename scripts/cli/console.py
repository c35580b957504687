"""The command `tril NAME [key=value ...]`, a subcommand for each script, and the text of --help."""

import importlib
import itertools
import json
import re
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tril.data.settings import Setting, nearest

if TYPE_CHECKING:
    from tril.scripts.cli.command_line import Program, Typed

COMMANDS = {
    "train": "train a model, or a grid of them with -m",
    "sample": "continue a prompt",
    "play": "try a model in the browser: tokens, attention, heads",
    "export": "write a model for Hugging Face transformers or llama.cpp",
    "evaluate": "loss, bits per byte, accuracy and calibration of a checkpoint on a text",
    "heads": "measure, remove and draw the attention heads of a model",
    "report": "compare the runs of a grid",
    "certify": "test that a model is causal",
    "referee": "judge a change: better, worse, equal or undecided",
}
WIDTH = 120  # columns
KEY_WIDTH = 44  # of "key=value"
COMMENT = re.compile(r"# \S")  # an indented one is an example
ADDED = ("ablation",)  # groups that a grid adds, as +ablation=heads


def main() -> None:
    """Entry point of the `tril` command."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  tril {name:<20} {description}" for name, description in COMMANDS.items()]
        print("\n".join(["Usage: tril COMMAND [key=value ...]", "", *lines]))
        print("\ntril COMMAND --help lists the keys of a command.")
    elif name == "--version":
        print(f"tril {version('tril')}")
    elif name in COMMANDS:
        sys.argv = [f"tril {name}", *arguments]  # the name that help and errors show
        importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}").main()
    else:
        print(f"error: there is no command tril {name}{nearest(name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)


def print_help(program: "Program", description: str, typed: "Typed", *, every: bool = False) -> None:
    """Prints what a program does, its settings with their values, and the options of its config groups.

    Args:
        typed: settings that are typed with --help, such as model=small.
        every: list all settings, and not only the program's own and the common ones of a run.
    """
    from tril.scripts.cli.config import CONFIGS, flatten, option

    if typed.overrides:
        from tril.scripts.cli.compose import compose_values

        line = compose_values(program.name, typed.without("resume"))
        settings, options = line.settings, line.choices
    else:  # without Hydra, whose import takes longer than all else
        options = program.options
        settings = {group: option(group, name) for group, name in options.items() if name is not None}
    values = flatten(settings)
    # another kind of text has others below data.
    known = {key: each for key, each in program.settings.items() if key in values or not key.startswith("data.")}
    shown = {key: each for key, each in known.items() if every or each.common or key in program.own.__pydantic_fields__}
    more = f"; --help=all lists all {len(known)}" if len(shown) < len(known) else ""
    lines = [description.strip(), "", f"Settings (key=value){more}", ""]
    for key, setting in shown.items():
        lines += entry_lines(f"{key}={as_typed(values.get(key, setting.default))}", help_of(setting))
    groups = [*program.options, *(ADDED if program.of_a_run else ())]
    lines += ["", "Groups (group=choice); * is chosen"] if groups else []
    for group in groups:
        lines.append("")
        for path in sorted((CONFIGS / group).glob("*.yaml")):
            mark = "* " if path.stem == options.get(group) else "  "
            sign = "+" if group in ADDED else ""
            lines += entry_lines(f"{mark}{sign}{group}={path.stem}", first_comment(path))
    print("\n".join(lines), flush=True)


def help_of(setting: Setting) -> str:
    """The help of a setting, with its choices and what it needs."""
    choices = " | ".join(as_typed(choice) for choice in setting.choices)
    listed = any(isinstance(choice, str) for choice in setting.choices) and "set by" not in setting.help
    needs = f"with {setting.needs}" if setting.needs and setting.needs not in setting.help else ""
    return "; ".join(filter(None, [choices if listed and choices not in setting.help else "", setting.help, needs]))


def first_comment(path: Path) -> str:
    """The first sentence of the comment at the head of a yaml file."""
    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
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
