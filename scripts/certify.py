"""Certifies that a model sees no future, and all of its past:  python scripts/certify.py ckpt=latest

Also a fresh model (model=nano model.window=64), a `transformers` model (hf=FOLDER) and any function from ids to logits
(call=package.module:function vocab_size=V context_length=T). All keys: configs/certify.yaml. The table goes to stdout, all figures and a
picture into a folder. Exit status 0: certified; 1: not; 2: what was typed cannot be.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from tril.data.cache import keep_compiled_code
from tril.model.runs import find_checkpoint, run_folder
from tril.scripts.common.cli import build, entry, pick_device, plain, task_overrides, user_errors, writable

KINDS = ("ckpt", "hf", "call")
TEXTS = (*KINDS, "out")  # keys whose value is text as it was typed


@entry("certify", TEXTS)
def main(cfg) -> None:
    cfg = plain(cfg)
    with user_errors():
        check(cfg, task_overrides())
        checkpoint = find_checkpoint(cfg["ckpt"]) if cfg["ckpt"] is not None else None
    keep_compiled_code()
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # on a CPU, for its result
    from tril.model.causality.grids.gpt_grid import (
        certify,  # importing torch takes a second: what is wrong above is said at once
    )
    from tril.model.training.hardware import keep_freed_memory

    with user_errors():
        device = pick_device(cfg["device"])
        name, cells = subject(cfg, checkpoint, device)
        own = run_folder(checkpoint) if checkpoint else Path("outputs/causality", Path(name).name.replace(":", "-"))
        folder = writable(cfg["out"] or own, "out")
    if device == "cpu":
        keep_freed_memory()
    certificate = certify(name, cells, progress=lambda cell: print(cell, file=sys.stderr, flush=True))
    report(certificate, folder)
    sys.exit(0 if certificate.passed else 1)


def check(cfg: dict, overrides: list[str]) -> None:
    """Raises ValueError for keys that do not go together."""
    given = [kind for kind in KINDS if cfg[kind] is not None]
    models = [override for override in overrides if override.lstrip("+~").startswith("model")]
    if len(given) > 1 or given and models:
        raise ValueError(
            f"{' and '.join([f'{kind}={cfg[kind]}' for kind in given] + models)} name several models; keep one"
        )
    if cfg["call"] is None and any(cfg[key] is not None for key in ("vocab_size", "context_length", "reach")):
        raise ValueError(
            "vocab_size, context_length and reach go with call=...; of a fresh model they are model.vocab_size and so on"
        )
    for key in ("compile", "exhaustive"):
        if not isinstance(cfg[key], bool):
            raise ValueError(f"{key}={cfg[key]} must be true or false")
    if cfg["compile"] and (cfg["hf"] is not None or cfg["call"] is not None):
        raise ValueError("compile=true is for Tril's own models; a function of call= may compile itself")


def subject(cfg: dict, checkpoint: Path | None, device: str) -> tuple[str, Iterator]:
    """What is certified: its name, and the cells of its grid."""
    from tril.model.causality.grids.gpt_grid import FRESH_VOCABULARY, gpt_cells

    options = {"device": device, "exhaustive": cfg["exhaustive"]}
    if cfg["hf"] is not None:
        from tril.model.causality.grids.transformers_grid import transformers_cells

        return cfg["hf"], transformers_cells(cfg["hf"], **options)
    if cfg["call"] is not None:
        from tril.model.causality.grids.callable_grid import callable_cells

        sizes = {key: cfg[key] for key in ("vocab_size", "context_length", "reach")}
        return cfg["call"], callable_cells(cfg["call"], **sizes, **options)
    if cfg["compile"]:
        from tril.model.training.hardware import check_compiler

        check_compiler(device)
    options["compile"] = cfg["compile"]
    if checkpoint is not None:
        from tril.model.checkpoint import load

        model = load(checkpoint).model
        return str(checkpoint), gpt_cells(model.config, model.state_dict(), **options)
    from tril.model.config import GPTConfig

    config = build(GPTConfig, cfg["model"] | {"vocab_size": cfg["model"]["vocab_size"] or FRESH_VOCABULARY}, "model")
    return chosen("model"), gpt_cells(config, **options)


def chosen(group: str) -> str:
    from hydra.core.hydra_config import HydraConfig

    return HydraConfig.get().runtime.choices[group]


def report(certificate, folder: Path) -> None:
    """The table and the first failure of each check to stdout, everything to causality.json, the picture to causality.png."""
    from tril.model.causality.plot import plot

    (folder / "causality.json").write_text(json.dumps(certificate.to_dict(), indent=2) + "\n", encoding="utf-8")
    plot(folder / "causality.png", certificate)
    print(f"{certificate.table()}\n")
    for failures in certificate.failures().values():
        first = failures[0]
        print(
            f"FAILED  {first.check}: {first.where}\n        {first.cell}, length {first.length}; {len(failures)} such in causality.json"
        )
    verdict = "sees no future, and all of its past" if certificate.passed else "is NOT certified"
    print(f"{certificate.subject} {verdict}: {len(certificate.results)} checks in {certificate.seconds:.0f} s")
    print(f"{folder}: causality.json, causality.png", flush=True)


if __name__ == "__main__":
    main()
