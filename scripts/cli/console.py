"""The command `tril NAME [key=value ...]`, a subcommand for each script, and Ctrl-C while it imports libraries."""

import importlib
import os
import signal
import sys

COMMANDS = {
    "train": "train a model, or a grid of them with -m",
    "sample": "continue a prompt",
    "play": "try a model in the browser: tokens, attention, heads",
    "export": "write a model for Hugging Face transformers",
    "evaluate": "loss, bits per byte and accuracy of a checkpoint on a text",
    "heads": "measure, remove and draw the attention heads of a model",
    "report": "compare the runs of a grid",
    "certify": "test that a model is causal",
    "referee": "judge a change: better, worse, equal or undecided",
}


def main() -> None:
    """Entry point of the `tril` command."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        end_at_interrupt()
        module = importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}")
        sys.argv = [str(module.__file__), *arguments]  # with which Lightning starts the other processes of a run
        module.main()
        return
    from tril.scripts.cli.errors import UserError, exit_with_one_line

    with exit_with_one_line():
        if name in ("-h", "--help"):
            lines = [f"  tril {name:<20} {description}" for name, description in COMMANDS.items()]
            print("\n".join(["Usage: tril COMMAND [key=value ...]", "", *lines]))
            print("\ntril COMMAND --help lists the keys of a command.")
        elif name == "--version":
            from importlib.metadata import version

            print(f"tril {version('tril')}")
        else:
            from tril.data.settings import nearest

            raise UserError(f"there is no command tril {name}{nearest(name, COMMANDS)}")


def end_at_interrupt() -> None:
    """From now on, Ctrl-C ends the program with one line, without an exception, which an `import` could swallow."""
    signal.signal(signal.SIGINT, _end_program)


def raise_at_interrupt() -> None:
    """Ctrl-C raises KeyboardInterrupt again; the handler of a program that calls `train` is kept."""
    if signal.getsignal(signal.SIGINT) is _end_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_program(signum: int, frame: object) -> None:
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(128 + signum)  # imports leave nothing to clean up
