"""The command `tril NAME [key=value ...]`, a subcommand for each script."""

import importlib
import sys
from importlib.metadata import version

from tril.data.settings import nearest
from tril.scripts.cli import interrupt

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
    if name in ("-h", "--help"):
        lines = [f"  tril {name:<20} {description}" for name, description in COMMANDS.items()]
        print("\n".join(["Usage: tril COMMAND [key=value ...]", "", *lines]))
        print("\ntril COMMAND --help lists the keys of a command.")
    elif name == "--version":
        print(f"tril {version('tril')}")
    elif name in COMMANDS:
        interrupt.begin()
        module = importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}")
        sys.argv = [str(module.__file__), *arguments]  # with which Lightning starts the other processes of a run
        module.main()
    else:
        print(f"error: there is no command tril {name}{nearest(name, COMMANDS)}", file=sys.stderr)
        sys.exit(2)
