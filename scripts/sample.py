"""Samples text from a checkpoint:  python scripts/sample.py ckpt=latest prompt="def " temperature=0.8 n=3

The text goes to stdout, everything else to stderr.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from tril.data.cache import keep_compiled_code
from tril.data.settings import setting, strict_settings
from tril.model.generation.config import SamplingConfig
from tril.model.runs import find_checkpoint
from tril.scripts.cli.command_line import CommandLine, Program, entry
from tril.scripts.cli.errors import pick_device, user_errors

OneOrMore = Annotated[
    list[str], Field(min_length=1), BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


@dataclass(frozen=True, config=strict_settings())
class SampleCommand(SamplingConfig):
    """What is sampled, and from which model."""

    ckpt: str = setting(
        "latest", "a checkpoint file, a run folder, or latest: the newest run below outputs/ and multirun/"
    )
    prompt: OneOrMore = setting("", 'text to continue, or a list: \'["To be", "Or not"]\'; empty starts a new text')
    n: int = setting(1, "samples per prompt; one is printed while it is generated, several as a batch", ge=1, le=10_000)
    remove_heads: OneOrMore | None = setting(
        None, 'heads to remove: "[L0H1, L2H3]", layer 0 head 1 and layer 2 head 3; null: none'
    )
    compile: Literal["auto", True, False] = setting(
        "auto", "true: compile the step after the prompt (up to a minute, then faster); auto: on CUDA; false"
    )
    device: str = setting("auto", "auto | cpu | cuda | mps")


@entry(Program("sample", SampleCommand))
def main(line: CommandLine[SampleCommand]) -> None:
    with user_errors():  # before torch, which takes a second to import
        path = find_checkpoint(line.own.ckpt)
        keep_compiled_code()
        pieces = sample(path, line.own)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()


def sample(path: Path, settings: SampleCommand) -> Iterator[str]:
    """The output: one text, streamed, or several as one batch under numbered lines. Mistakes are raised by the call."""
    from tril.model.checkpoint import load
    from tril.model.heads.gate import head_gate
    from tril.model.training.hardware import check_compiler, compiles_by_default, keep_freed_memory

    device = pick_device(settings.device)
    if device == "cpu":
        keep_freed_memory()
    if compiled := compiles_by_default(device) if settings.compile == "auto" else settings.compile:
        check_compiler(device)
    lm = load(path, device)
    lm.check_finite(path)
    gate = None if settings.remove_heads is None else head_gate(lm.config, settings.remove_heads)
    options = {name: getattr(settings, name) for name in SamplingConfig.__dataclass_fields__}
    options |= {"compile": compiled, "head_gate": gate}
    prompts = [prompt for prompt in settings.prompt for _ in range(settings.n)]
    if len(prompts) == 1:
        pieces = itertools.chain(prompts, lm.stream(prompts[0], **options), ["\n"])
    else:
        texts = enumerate(zip(prompts, lm.generate(prompts, **options), strict=True), 1)
        pieces = (f"--- {i}/{len(prompts)} ---\n{prompt}{text}\n" for i, (prompt, text) in texts)
    note = ", compiled (the second token takes a while the first time)" if compiled else ""
    print(f"{path} on {device}{note}", file=sys.stderr, flush=True)
    return pieces


if __name__ == "__main__":
    main()
