"""Samples text from a checkpoint:  tril sample ckpt=latest prompt="def " temperature=0.8 n=3

Without a prompt, on a terminal, it asks for one after another. The text goes to stdout, everything else to stderr.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tril.data.settings import printable
from tril.model.atomic_files import reading
from tril.model.generation.config import SampleConfig, SamplingConfig
from tril.model.runs import find_checkpoint
from tril.scripts.cli.app import Composed, command, unescaped
from tril.scripts.cli.errors import UserError, user_errors


@command("sample", SampleConfig)
def main(settings: SampleConfig, composed: Composed) -> None:
    with user_errors():
        path, prompt = find_checkpoint(settings.ckpt), settings.prompt
        if (file := settings.prompt_file) is not None:
            with reading(Path("/dev/stdin" if file == "-" else file).expanduser()) as content:
                prompt = content.read_bytes().decode("utf-8")
        from tril.model.heads.ablation import head_gate
        from tril.model.runs import load
        from tril.model.training.hardware import choose_compile, use_device

        device = use_device(settings.device)
        choose_compile(settings.compile, device)  # raises an error without a compiler
        lm = load(path, device)
        lm.check_finite(path)
        gate = None if settings.remove_heads is None else head_gate(lm.config, settings.remove_heads)
        options = {name: getattr(settings, name) for name in SamplingConfig.__dataclass_fields__}
        options |= {"n": settings.n, "compile": settings.compile, "head_gate": gate}
        asks = not {"prompt", "prompt_file"} & composed.given.keys() and sys.stdin.isatty() and sys.stdout.isatty()
        pieces = iter(()) if asks else lm.samples([prompt], **options)
    note = ", compiled (the second token takes a while the first time)" if settings.compile else ""
    print(f"{path} on {device}{note}", file=sys.stderr, flush=True)
    try:
        show(pieces)
        while asks:
            try:
                with user_errors():
                    show(lm.samples([unescaped(input("\nprompt: "))], **options))
            except UserError as error:
                print(f"error: {printable(str(error))}", file=sys.stderr)
    except (KeyboardInterrupt, EOFError):
        print()


def show(pieces: Iterator[str]) -> None:
    """Prints them. On a terminal, control characters of the text are escaped, since they could change it."""
    for piece in pieces:
        print(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece, end="", flush=True)


if __name__ == "__main__":
    main()
