"""Samples text from a checkpoint:  python scripts/sample.py ckpt=latest prompt="def " temperature=0.8 n=3

The text goes to stdout, everything else to stderr.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.dataclasses import dataclass

from tril.data.cache import keep_compiled_code
from tril.data.settings import build, strict_settings
from tril.model.generation.config import SamplingConfig
from tril.model.runs import find_checkpoint
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import drop_output, pick_device, user_errors
from tril.scripts.cli.typed import Typed

if TYPE_CHECKING:
    from tril.model.generation.language_model import LanguageModel

TEXT_KEYS = ("ckpt", "prompt", "prompt_file", "stop")


def _to_list(prompt: Any) -> list[str]:
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prompt={prompt} must be a text or a list of texts; quote numbers in a list")
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that is not UTF-8
            raise ValueError(f"prompt={text!r} is not UTF-8; set the terminal to UTF-8") from error
    return texts


@dataclass(frozen=True, config=strict_settings())
class Settings:
    """The keys of configs/sample.yaml, without those of `SamplingConfig`."""

    ckpt: str
    prompt: Annotated[list[str], BeforeValidator(_to_list)]
    prompt_file: str | None
    n: Annotated[int, Field(ge=1, le=10_000)]  # one batch
    stream: bool
    remove_heads: Any
    use_cache: bool
    compile: Literal["auto", True, False]
    device: str

    @model_validator(mode="after")
    def _one_source(self) -> "Settings":
        if self.prompt_file is not None and self.prompt != [""]:
            raise ValueError("prompt and prompt_file are both set; leave one out")
        return self

    def prompts(self) -> list[str]:
        """The prompts, each repeated n times."""
        texts = self.prompt if self.prompt_file is None else [read_text(self.prompt_file)]
        return [text for text in texts for _ in range(self.n)]


@entry("sample", TEXT_KEYS)
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():  # before torch, which takes a second to import
        options = {key: cfg.pop(key) for key in SamplingConfig.__dataclass_fields__ if key in cfg}
        build(SamplingConfig, options)
        settings = build(Settings, cfg)
        prompts, path = settings.prompts(), find_checkpoint(settings.ckpt)
    keep_compiled_code()
    from tril.model.checkpoint import load
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(settings.device)
        if device == "cpu":
            keep_freed_memory()
        compiled = compiles(settings.compile, device, settings.use_cache)
        lm = load(path, device)
        lm.check_finite(path)
        options |= {"use_cache": settings.use_cache, "compile": compiled, **removed(lm, settings.remove_heads)}
        pieces = sample(lm, prompts, settings.stream, options)
    note = ", compiled (the second token takes a while the first time)" if compiled else ""
    print(f"{path} on {device}{note}", file=sys.stderr, flush=True)
    show(pieces)


def read_text(file: str) -> str:
    """The content of a UTF-8 text file; "~" is expanded.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    try:
        return Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        remedy = "convert it first, e.g. iconv -f latin1 -t utf-8"
        raise ValueError(f"prompt_file={file} is not UTF-8 ({error.reason}); {remedy}") from error


def compiles(compile: bool | str, device: str, use_cache: bool) -> bool:
    """Whether to compile the step; "auto" compiles to a CUDA graph, which a single stream gains most from.

    Raises:
        ValueError: the compiler is missing.
    """
    from tril.model.training.hardware import check_compiler, compiles_by_default

    if compile == "auto":
        return use_cache and compiles_by_default(device)
    if compile:
        check_compiler(device)
    return bool(compile)


def removed(lm: "LanguageModel", names: str | list[str] | None) -> dict:
    """The option of `lm.generate` that removes the named heads; {} for None."""
    if names is None:
        return {}
    if names == []:
        raise ValueError("remove_heads=[] must name at least one head, such as [L0H0]; use null for none")
    from tril.model.heads.ablation import head_gate

    names = names if isinstance(names, list) else [names]
    return {"head_gate": head_gate(lm.config, list(map(str, names))).to(lm.model.embed.weight.device)}


def sample(lm: "LanguageModel", prompts: list[str], stream: bool, options: dict) -> Iterator[str]:
    """The output: one text, streamed by default, or several as one batch under numbered lines."""
    if stream and len(prompts) == 1:
        return itertools.chain(prompts, lm.stream(prompts[0], **options), ["\n"])
    texts = [prompt + text + "\n" for prompt, text in zip(prompts, lm.generate(prompts, **options), strict=True)]
    if len(texts) == 1:
        return iter(texts)
    return (f"--- {i}/{len(texts)} ---\n{text}" for i, text in enumerate(texts, 1))


def show(pieces: Iterator[str]) -> None:
    """Prints piece after piece, until Ctrl-C or until the reader of a pipe closes it (`| head`)."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:
        drop_output()


if __name__ == "__main__":
    main()
