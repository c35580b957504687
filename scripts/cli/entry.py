"""How a program starts. A script declares its settings as fields of a class, and its main function gets them:

@entry(Program("sample", SampleConfig))
def main(line: CommandLine[SampleConfig]) -> None:
    print(line.own.temperature)
"""

import functools
import gc
import io
import os
import sys
from collections.abc import Callable

from tril.scripts.cli.command_line import PROGRAMS, CommandLine, Program, Typed
from tril.scripts.cli.compose import compose
from tril.scripts.cli.errors import MEANT, UserError, fail

# Objects before a collection: Python's 700 lengthen imports by a fifth, 100,000 let memory grow while a model trains.
COLLECTION_THRESHOLD = 10_000
HELP, GRID = ("-h", "--help", "--help=all"), ("-m", "--multirun")


def entry(program: Program, grid: Callable | None = None) -> Callable[[Callable[[CommandLine], object]], Callable]:
    """Decorator of `main(line)`, which becomes a function without arguments that reads sys.argv.

    A user's mistake ends the process with one line and status 2.

    Args:
        grid: the task of Hydra's multirun; None: the program has no -m.
    """
    PROGRAMS[program.name] = program

    def decorate(task: Callable[[CommandLine], object]) -> Callable[[], object]:
        @functools.wraps(task)
        def main() -> object:
            gc.set_threshold(COLLECTION_THRESHOLD)
            if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is not an error
                sys.stdout.reconfigure(errors="replace")
            try:
                try:
                    return run(program, task, grid, sys.argv[1:])
                finally:
                    sys.stdout.flush()  # here, and not at exit: the reader of a pipe may be gone, also after --help
            except UserError as error:
                fail(error)
            except BrokenPipeError:  # `--help | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's flush at exit fails
                sys.exit(141)  # 128 + SIGPIPE

        return main

    return decorate


def run(program: Program, task: Callable[[CommandLine], object], grid: Callable | None, arguments: list[str]) -> object:
    """Runs a command line: the task, a grid, or the help."""
    words = [word for word in arguments if word not in HELP + GRID]
    if asked := [word for word in arguments if word in HELP]:
        from tril.scripts.cli.console import print_help

        return print_help(program, sys.modules[task.__module__].__doc__ or "", Typed.of(words), every=HELP[-1] in asked)
    for word in words:
        key, _, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            key = key.replace("-", "_")
            remedy = f"write {MEANT.get(key, key)}={value or 'VALUE'}"
            raise UserError(f"{word}: settings have no dashes; {remedy}")
        if "=" not in word and not word.startswith("~"):
            recipe = ", and a recipe is experiment=NAME" if word.endswith((".py", ".yaml")) else ""
            raise UserError(f"cannot read {word!r}; settings are written key=value{recipe}")
    if not any(word in GRID for word in arguments):
        return task(compose(program.name, Typed.of(words)))
    if grid is None:
        raise UserError(f"-m starts a grid of training runs, which {program.name} cannot; leave it out")
    from tril.scripts.cli.hydra_config import run_grid

    return run_grid(program, Typed.of(words), grid)
