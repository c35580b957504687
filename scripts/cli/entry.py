"""What all entry points share: they read the command line, and report a user's mistake in one line with status 2."""

import argparse
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Collection
from typing import Any

from tril.scripts.cli.errors import MEANT, UserError, drop_output, fail, program
from tril.scripts.cli.typed import Typed

MULTIRUN = ("-m", "--multirun")
OF_HYDRA = ("cfg", "info", "hydra_help", "shell_completion")  # options with which Hydra prints something and ends
UNUSED = ("config_name", "config_path", "config_dir")  # options that would replace our settings


def entry(
    config_name: str, free_text: Collection[str] = (), grid: Callable | None = None
) -> Callable[[Callable[[dict[str, Any], Typed], object]], Callable[[], object]]:
    """Decorator of `main(settings, typed)`, which gets the composed settings and what was typed.

    Args:
        config_name: the yaml in configs/.
        free_text: keys whose value is free text, such as a path.
        grid: the task of Hydra's multirun; None: the program has no -m.

    Returns:
        A decorator that returns a function without arguments.
    """

    def decorate(task: Callable[[dict[str, Any], Typed], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def main() -> object:
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra then raises its exceptions instead of printing them
            if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is not an error
                sys.stdout.reconfigure(errors="replace")
            try:
                try:
                    return run(sys.argv[1:])
                finally:
                    sys.stdout.flush()  # here, and not at exit: the reader of a pipe may be gone, also after --help
            except UserError as error:
                fail(error)
            except BrokenPipeError:  # `--help | head`
                drop_output()
                sys.exit(141)  # 128 + SIGPIPE

        def run(arguments: list[str]) -> object:
            if {"-h", "--help"} & set(arguments):
                from tril.scripts.cli.help import print_help

                words = [argument for argument in arguments if not argument.startswith("-")]
                return print_help(config_name, sys.modules[task.__module__].__doc__ or "", Typed.of(words, free_text))
            words = [argument for argument in arguments if argument not in MULTIRUN]  # argparse takes it last only
            options = parse_options(words)
            options.multirun = len(words) < len(arguments)
            if options.multirun and grid is None:
                raise UserError(f"-m starts a grid of training runs, which {program()} cannot; leave it out")
            typed = Typed.of(options.overrides, None if options.multirun else free_text)
            from tril.scripts.cli.compose import compose, run_hydra

            if options.multirun or any(getattr(options, name) for name in OF_HYDRA):
                return run_hydra(options, typed, grid, config_name)
            composed = compose(config_name, typed)
            if grid is not None:
                composed.check_single(typed)
            return task(composed.settings, typed)

        return main

    return decorate


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Hydra's options, such as --cfg job; raises UserError for others, which are settings with dashes."""
    from hydra._internal.utils import get_args_parser

    def error(message: str) -> None:
        dashed = re.search(r" --?([A-Za-z][\w.-]*)(?:[= ](\S+))?", message) if "unrecognized" in message else None
        if dashed is None:
            raise UserError(f"{message}; see {program()} --help")
        key, value = dashed[1].replace("-", "_"), dashed[2] or "VALUE"
        raise UserError(f"{dashed[0].strip()}: settings have no dashes; write {MEANT.get(key, key)}={value}")

    parser = get_args_parser()
    parser.error = error  # pyright: ignore[reportAttributeAccessIssue] it raises
    options = parser.parse_args(arguments)
    for name in UNUSED:
        if given := getattr(options, name):
            remedy = "add a folder of config files with hydra.searchpath=[file:///FOLDER]"
            raise UserError(f"--{name.replace('_', '-')}={given} has no effect on {program()}; {remedy}")
    if wrong := [word for word in options.overrides if "=" not in word and not word.startswith("~")]:
        raise UserError(f"cannot read {wrong[0]!r}; settings are written key=value")
    return options
