"""Samples text from a checkpoint:  tril sample ckpt=latest prompt="def " temperature=0.8 n=3

The text goes to stdout, everything else to stderr.
"""

import os
import sys
from pathlib import Path

from tril.data.settings import printable
from tril.model.atomic_files import reading
from tril.model.generation.config import SampleConfig, SamplingConfig
from tril.model.runs import find_checkpoint
from tril.scripts.cli.app import Composed, command
from tril.scripts.cli.errors import user_errors


@command("sample", SampleConfig)
def main(settings: SampleConfig, composed: Composed) -> None:
    with user_errors():
        path, prompt = find_checkpoint(settings.ckpt), settings.prompt
        if (file := settings.prompt_file) is not None:
            with reading(Path("/dev/stdin" if file == "-" else os.path.expanduser(file))) as content:
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
        pieces = lm.samples([prompt], n=settings.n, compile=settings.compile, head_gate=gate, **options)
    note = ", compiled (the second token takes a while the first time)" if settings.compile else ""
    print(f"{path} on {device}{note}", file=sys.stderr, flush=True)
    try:
        for piece in pieces:  # on a terminal without control characters, which could change it
            print(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece, end="", flush=True)
    except KeyboardInterrupt:
        print()


if __name__ == "__main__":
    main()
