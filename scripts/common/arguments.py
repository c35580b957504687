"""The command line, rewritten before Hydra's parser reads it."""

import re
from collections.abc import Collection
from pathlib import Path

MULTIRUN = {"-m", "--multirun"}
READ_TEXT = ("train", "evaluate")  # programs for which data.path=FILE means data=files
DEBUG = (  # what debug=true stands for; keys that are typed too win
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
    "trainer.log_every_n_steps=5",
    "optim.schedule.warmup_steps=5",
    "data.token_budget=200000",
    "data.val_token_budget=20000",
)
PATHS = ("data.path", "data.val_path", "data.chat_template", "data.repo")
RUN_TEXT_KEYS = ("resume", "init_from", *PATHS, "callbacks.samples.prompt")  # of train.py, see `quoted`


def rewritten(arguments: list[str], program: str, text_keys: Collection[str], experiments: Path) -> list[str]:
    """The command line as Hydra's parser gets it.

    Args:
        program: its name, such as "train".
        text_keys: keys whose value is free text, see `quoted`; with -m, a comma separates the values of a grid.
        experiments: the folder of their yaml files.
    """
    with_data = [path.stem for path in experiments.iterdir() if " /data:" in path.read_text("utf-8")]
    arguments = arranged(arguments, program, with_data)
    if MULTIRUN & set(arguments):
        return arguments
    return of_the_resumed_run([quoted(argument, text_keys) for argument in arguments])


def arranged(arguments: list[str], program: str, experiments: Collection[str] = ()) -> list[str]:
    """The command line with -m first, as Hydra's parser needs it, with data=files where only its path is given, and
    with the settings of debug=true.

    Args:
        program: its name, such as "train".
        experiments: those that choose their data themselves.
    """
    flags = [argument for argument in arguments if argument in MULTIRUN]
    settings = [argument for argument in arguments if argument not in MULTIRUN]
    parts = (argument.lstrip("+").partition("=") for argument in settings)
    typed = {key: value for key, _, value in parts}
    chosen = typed.keys() & {"data", "resume"} or typed.get("experiment") in experiments
    own_text = program in READ_TEXT and "data.path" in typed and not chosen
    short = list(DEBUG) * (program == "train" and typed.get("debug") == "true")
    settings = [argument for argument in settings if not short or argument != "debug=true"]
    return flags[:1] + ["data=files"] * own_text + short + settings


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
