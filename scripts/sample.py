"""Samples text from a checkpoint:  python scripts/sample.py ckpt=latest prompt="def " temperature=0.8 n=3

Without a prompt, on a terminal, it asks for one after another. The text goes to stdout, everything else to stderr.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from tril.data.cache import keep_compiled_code
from tril.data.settings import printable, setting, strict_settings
from tril.model.generation.config import Prompt, SamplingConfig, as_prompt
from tril.model.runs import find_checkpoint
from tril.scripts.cli.command_line import CommandLine, Program
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import UserError, pick_device, user_errors

AS_LIST = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


@dataclass(frozen=True, config=strict_settings())
class SampleCommand(SamplingConfig):
    """What is sampled, and from which model."""

    ckpt: str = setting(
        "latest", "a checkpoint file, a run folder, or latest: the newest run below outputs/ and multirun/"
    )
    prompt: Annotated[list[Prompt], Field(min_length=1), AS_LIST] = setting(
        "", """text to continue, or a list: '["To be", "Or not"]'; \\n is a line end; empty starts a new text"""
    )
    n: int = setting(1, "samples per prompt; one is printed while it is generated, several as a batch", ge=1, le=10_000)
    remove_heads: Annotated[list[str], Field(min_length=1), AS_LIST] | None = setting(
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
        sample, description = load_sampler(path, line.own)
        asks = "prompt" not in line.typed and sys.stdin.isatty() and sys.stdout.isatty()
        pieces = iter(()) if asks else sample(line.own.prompt)
    print(description, file=sys.stderr, flush=True)
    try:
        show(pieces)
        while asks:
            try:
                with user_errors():
                    show(sample([as_prompt(input("\nprompt: "))]))
            except UserError as error:
                print(f"error: {printable(str(error))}", file=sys.stderr)
    except (KeyboardInterrupt, EOFError):
        print()


def load_sampler(path: Path, settings: SampleCommand) -> tuple[Callable[[Sequence[str]], Iterator[str]], str]:
    """A function of prompts, and in words what it samples from.

    The function returns the output: one text, streamed, or several as one batch under numbered lines. Its call raises
    ValueError for a mistake.
    """
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
    note = ", compiled (the second token takes a while the first time)" if compiled else ""

    def sample(prompts: Sequence[str]) -> Iterator[str]:
        prompts = [prompt for prompt in prompts for _ in range(settings.n)]
        if len(prompts) == 1:
            return itertools.chain(prompts, lm.stream(prompts[0], **options), ["\n"])
        texts = enumerate(zip(prompts, lm.generate(prompts, **options), strict=True), 1)
        return (f"--- {i}/{len(prompts)} ---\n{prompt}{text}\n" for i, (prompt, text) in texts)

    return sample, f"{path} on {device}{note}"


def show(pieces: Iterator[str]) -> None:
    """Prints them. On a terminal, control characters of the text are escaped, since they could change it."""
    for piece in pieces:
        print(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece, end="", flush=True)


if __name__ == "__main__":
    main()
