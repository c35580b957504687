"""The command line, rewritten before Hydra's parser reads it."""

import re
from collections.abc import Collection

MULTIRUN = {"-m", "--multirun"}
PATHS = ("data.path", "data.val_path", "data.old_path", "data.chat_template", "data.repo")
RUN_TEXT_KEYS = ("resume", "init_from", *PATHS, "callbacks.samples.prompt")  # of train.py, see `quoted`


def arranged(arguments: list[str], *, reads_text: bool, experiments: Collection[str] = ()) -> list[str]:
    """The command line with -m first, as Hydra's parser needs it, and with data=files where only its path is given.

    Args:
        reads_text: the program has the config group `data`.
        experiments: those that choose their data themselves.
    """
    flags = [argument for argument in arguments if argument in MULTIRUN]
    settings = [argument for argument in arguments if argument not in MULTIRUN]
    parts = (argument.lstrip("+").partition("=") for argument in settings)
    typed = {key: value for key, _, value in parts}
    chosen = typed.keys() & {"data", "resume"} or typed.get("experiment") in experiments
    own_text = reads_text and "data.path" in typed and not chosen
    return flags[:1] + ["data=files"] * own_text + settings


def quoted(argument: str, text_keys: Collection[str]) -> str:
    """Quotes the value of a command line argument whose key is one of `text_keys`.

    Hydra's grammar would strip the space of `prompt=def ` and reject `prompt=print(x`. A value that needs the grammar
    (null, a list, a quoted text) stays unchanged.
    """
    key, equals, text = argument.partition("=")
    has_grammar = re.fullmatch(r"""null|\[.*\]|(["'])(\\.|(?!\1).)*\1""", text, re.DOTALL)
    if key not in text_keys or not equals or has_grammar:
        return argument
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # no interpolation
    text = re.sub(
        r"(\\*)('|\Z)", lambda match: 2 * match[1] + ("\\'" if match[2] else ""), text
    )  # no end of the quotes
    return f"{key}='{text}'"


def of_the_resumed_run(arguments: list[str]) -> list[str]:
    """With resume=, Hydra accepts keys that its own composition lacks, such as data.path of a run with data=files."""
    if not any(argument.startswith("resume=") for argument in arguments):
        return arguments
    return [
        f"++{argument}" if re.match(r"\w+\.[\w.]+=", argument) and not argument.startswith("hydra.") else argument
        for argument in arguments
    ]
