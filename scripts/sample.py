"""Samples text from a checkpoint:  python scripts/sample.py ckpt=latest prompt="def " temperature=0.8 n=3

All keys: configs/sample.yaml. The text goes to stdout, everything else to stderr.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from tril.data.cache import keep_compiled_code
from tril.model.runs import find_checkpoint
from tril.scripts.common.cli import drop_output, entry, pick_device, plain, user_errors

TEXTS = ("ckpt", "prompt", "prompt_file", "stop")  # keys whose value is text as it was typed
OPTIONS = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "stop",
    "seed",
    "use_cache",
)


@entry("sample", TEXTS)
def main(cfg) -> None:
    cfg = plain(cfg)
    with user_errors():
        prompts, path = read_prompts(cfg), find_checkpoint(str(cfg["ckpt"]))
    keep_compiled_code()
    from tril.model.checkpoint import load  # importing torch takes a second: what is wrong above is said at once
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(cfg["device"])
        if device == "cpu":
            keep_freed_memory()
        options = {key: cfg[key] for key in OPTIONS} | {"compile": compiles(cfg["compile"], device, cfg["use_cache"])}
        lm = load(path, device)
        pieces = sample(lm, prompts, cfg["stream"], options | removed(lm, cfg["remove_heads"]))
    compiled = ", compiled (the second token takes a while the first time)" if options["compile"] else ""
    print(f"{path} on {device}{compiled}", file=sys.stderr, flush=True)
    show(pieces)


def read_prompts(cfg: dict) -> list[str]:
    """The prompts, each as often as it is to be sampled."""
    prompt, file, n = cfg["prompt"], cfg["prompt_file"], cfg["n"]
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n} must be a whole number, at least 1")
    if file is not None:
        if prompt:
            raise ValueError("prompt and prompt_file are both given; leave one out")
        try:
            prompt = Path(file).expanduser().read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"prompt_file={file} is not UTF-8 ({error.reason}); convert it first, e.g. iconv -f latin1 -t utf-8"
            ) from error
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts or not all(isinstance(text, str) for text in prompts):
        raise ValueError(f"prompt={prompt} must be a text or a list of texts; quote numbers in a list")
    for text in prompts:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a byte of the command line that was no UTF-8
            raise ValueError(f"prompt={text!r} is not UTF-8; set the terminal to UTF-8") from error
    return [text for text in prompts for _ in range(n)]


def compiles(compile: bool | str, device: str, use_cache: bool) -> bool:
    """Whether the step is compiled: with auto where that is a CUDA graph, which a single stream needs most. Raises ValueError."""
    if compile not in ("auto", True, False):
        raise ValueError(f"compile={compile} must be auto, true or false")
    from tril.model.training.hardware import check_compiler, compiles_by_itself

    if compile == "auto":
        return use_cache and compiles_by_itself(device)
    if compile:
        check_compiler(device)
    return compile


def removed(lm, names: str | list[str] | None) -> dict:
    """The option of `lm.generate` that samples without these heads; nothing for None."""
    if names is None:
        return {}
    from tril.model.heads.ablation import head_gate

    names = names if isinstance(names, list) else [names]
    return {"head_gate": head_gate(lm.config, list(map(str, names))).to(lm.model.embed.weight.device)}


def sample(lm, prompts: list[str], stream: bool, options: dict) -> Iterator[str]:
    """What is to be written: one text as it comes, several as one batch under numbered lines."""
    if stream and len(prompts) == 1:
        return itertools.chain(prompts, lm.stream(prompts[0], **options), ["\n"])
    texts = [prompt + text + "\n" for prompt, text in zip(prompts, lm.generate(prompts, **options))]
    if len(texts) == 1:
        return iter(texts)
    return (f"--- {i}/{len(texts)} ---\n{text}" for i, text in enumerate(texts, 1))


def show(pieces: Iterator[str]) -> None:
    """Writes piece after piece, until the reader has had enough: Ctrl-C, or the end of `| head`."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:
        drop_output()


if __name__ == "__main__":
    main()
