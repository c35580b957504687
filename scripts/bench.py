"""Times what this machine makes of a model:  python scripts/bench.py what=[train,outside] model=small

Everything that train.py can train can be timed. All keys: configs/bench.yaml. The tables go to stdout; bench.md, bench.json (with every
single repetition) and bench.png into a folder. vs="python train.py ..." puts another program beside ours.
"""

import importlib
import os
import shlex
import sys
import tempfile
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from tril.model.runs import find_checkpoint
from tril.scripts.benchmarks import versus
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.common.cli import entry, nearest, plain, task_overrides, user_errors
from tril.scripts.common.run_config import Plan
from tril.scripts.common.run_config import check as check_plan

PARTS = {  # name: module of scripts.benchmarks, its function
    "train": ("training_speed", "train"),
    "outside": ("training_speed", "outside"),
    "decode": ("decoding", "run"),
    "data": ("preparing", "run"),
    "start": ("starting", "run"),
    "attention": ("attention_speed", "run"),
    "cost": ("cost", "run"),
}
TEXTS = ("vs", "vs_dir", "vs_pattern", "vs_sample", "ckpt", "out")  # keys whose value is text as it was typed
OWN = (
    *TEXTS,
    "what",
    "repeats",
    "warmup",
    "steps",
    "vs_tokens",
    "output_dir",
)  # keys that train.py does not know, or not as meant here
FEWEST = {"repeats": 1, "warmup": 0, "steps": 1}
COMMAND = shlex.join(["python", *sys.argv])  # as typed
VOCABULARY = {"byte": 256 + 1, "char": 65 + 2}  # with end-of-text; char: of tiny shakespeare, with unknown


@entry("bench", TEXTS)
def main(cfg: DictConfig) -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # before anything of ours adds to it
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        with user_errors():
            names = check(cfg)
            cfg.output_dir = folder
            plan = plan_of(cfg)  # imports torch: what is wrong above is said at once
            out = Path(cfg.out or f"outputs/bench/{datetime.now():%Y-%m-%d-%H-%M-%S}")
            out.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            plan, plain(cfg), cfg.repeats, cfg.warmup, cfg.steps, for_training(task_overrides()), Path(folder)
        )
        try:
            run(bench, names, out, load)
        finally:
            if not any(out.iterdir()):
                out.rmdir()


def check(cfg: DictConfig) -> list[str]:
    """The parts that are asked for. Raises ValueError or OSError for what can be seen to be wrong before torch is there."""
    names = list(cfg.what) if OmegaConf.is_list(cfg.what) else [cfg.what]
    for name in names:
        if name not in PARTS:
            raise ValueError(f"what={name} is no part of the benchmark{nearest(str(name), PARTS)}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"what={cfg.what} must name each part once, and at least one; legal are {', '.join(PARTS)}")
    for key, fewest in FEWEST.items():
        if type(cfg[key]) is not int or cfg[key] < fewest:
            raise ValueError(f"{key}={cfg[key]} must be a whole number of at least {fewest}")
    versus.check(cfg, names)
    if cfg.ckpt is not None:
        find_checkpoint(str(cfg.ckpt))
    return names


def plan_of(cfg: DictConfig) -> Plan:
    """The checked settings, with the vocabulary that the tokenizer will have where none is chosen."""
    plan = check_plan(cfg)
    if cfg.model.vocab_size is not None:
        return plan
    tokenizer = plan.data.tokenizer
    if tokenizer.kind == "hub":
        raise ValueError(
            f"model.vocab_size=null: {tokenizer.path} would have to be loaded to know; say it, as in model.vocab_size=50304"
        )
    if tokenizer.kind == "file":
        from tril.data.tokenizer import build, n_ids

        size = n_ids(build(tokenizer, ()))
    else:
        size = tokenizer.vocab_size if tokenizer.kind == "bpe" else VOCABULARY[tokenizer.kind]
    return replace(plan, model=replace(plan.model, vocab_size=size))


def for_training(overrides: list[str]) -> list[str]:
    """Those of the typed key=value that train.py knows."""
    return [override for override in overrides if override.partition("=")[0].lstrip("+~") not in OWN]


def run(bench: Bench, names: list[str], out: Path, load: float | None) -> None:
    """One part after another; each table is on the disk before the next is measured."""
    from tril.model.training.hardware import settle
    from tril.scripts.benchmarks import output
    from tril.scripts.benchmarks.machine import machine

    settle(bench.device)
    about = machine(bench.plan.hardware, load) | {"command": COMMAND}
    print(output.heading(about), flush=True)
    sections: list[Section] = []
    for name in names:
        module, function = PARTS[name]
        for section in getattr(importlib.import_module(f"tril.scripts.benchmarks.{module}"), function)(bench):
            print(f"\n{output.text(section)}", flush=True)
            sections.append(section)
            output.write(out, about, bench.cfg, sections)
    files = ["bench.md", "bench.json"] + ["bench.png"] * output.plot(out / "bench.png", about, sections)
    print(f"\n{out}: {', '.join(files)}", flush=True)


if __name__ == "__main__":
    main()
