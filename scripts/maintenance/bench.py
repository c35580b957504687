"""Measures Tril on this machine:  python -m tril.scripts.maintenance.bench PART [options] [key=value ...]

  train   tokens per second of whole training runs with these settings, from metrics.csv, after a warm-up
  decode  tokens per second of sampling by a model with random weights, or by --ckpt

--vs "COMMAND" measures another program in the same pairs: for train, one that prints the milliseconds of its steps as
nanoGPT does; for decode, one that samples {n} tokens. What is compared runs in alternating order, A B, B A, ...; the
table has the median, the smallest and the largest value, and the median ratio to the first row, taken in each
repetition. --json FILE keeps all values.
"""

import argparse
import csv
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from tril.model.atomic_files import write_json
from tril.model.formats import markdown_table
from tril.model.training.hardware import configure_torch
from tril.model.training.summary import code_version
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, fail
from tril.scripts.cli.run import choose_hardware

TRAIN = (sys.executable, "-m", "tril.train")
STEP_TIME = r"time ([0-9.]+)ms"  # of a step, in the output of nanoGPT
PROMPT, SHORT, LONG = 16, 64, 64 + 512  # tokens; sampling counts the difference of a long and a short sample
UNIT = "tokens/s"
Tasks = dict[str, Callable[[], float]]  # row of the table: one repetition


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as of train.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=10, help="steps of `train` that do not count")
    parser.add_argument("--steps", type=int, default=50, help="steps of `train` that count")
    parser.add_argument("--vs", metavar="COMMAND", help="of another program; `python` is this interpreter")
    parser.add_argument("--vs-dir", default=".", help="the folder that it starts in")
    parser.add_argument("--vs-tokens", type=int, help="tokens in a step of it; otherwise as many as in ours")
    parser.add_argument("--ckpt", help="the checkpoint of `decode`")
    parser.add_argument("--json", help="a file for the values of all repetitions")
    options = parser.parse_intermixed_args(arguments)
    try:
        line = compose("train", options.settings)
        config = RunConfig.of(line.settings, line.given)
        config = config.complete(choose_hardware(config), config.data.prepare().meta["vocab_size"])
        about = machine(config)
        values = interleave(PARTS[options.part](config, options), options.repeats)
    except (UserError, OSError) as error:
        fail(error)
    print("\n".join(f"- {name}: {value}" for name, value in about.items()))
    print(f"\n{table(values)}")
    if options.json:
        write_json(options.json, {"part": options.part, "unit": UNIT, "machine": about, "values": values})


def machine(config: RunConfig) -> dict[str, Any]:
    """What the figures depend on."""
    assert config.hardware is not None
    device = f"{config.hardware.device_name}, {torch.get_num_threads()} threads, {config.hardware.precision}"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    load = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    now = f"{datetime.now():%Y-%m-%d %H:%M}"
    return {"device": device, "versions": versions, "code": code_version(), "date": now, "load before": load}


def interleave(tasks: Tasks, repeats: int) -> dict[str, list[float]]:
    """The values of each task, run in alternating order, so that a drift of the machine favors none."""
    values: dict[str, list[float]] = {name: [] for name in tasks}
    for repetition in range(repeats):
        for name in list(tasks)[:: -1 if repetition % 2 else 1]:
            values[name].append(tasks[name]())
        print(f"repetition {repetition + 1} of {repeats}", file=sys.stderr, flush=True)
    return values


def table(values: dict[str, list[float]]) -> str:
    """Markdown with one row per task."""
    first, rows = next(iter(values.values())), [["", UNIT, "smallest", "largest", "ratio to the first row"]]
    for name, series in values.items():
        ratio = statistics.median(x / y for x, y in zip(series, first, strict=True))
        figures = statistics.median(series), min(series), max(series), ratio
        rows.append([name, *(f"{float(f'{figure:.4g}'):,.10g}" for figure in figures)])
    return markdown_table(rows)


def run(command: Sequence[str], folder: str = ".") -> tuple[float, str]:
    """Seconds and output of a process; raises UserError if it fails."""
    started = time.perf_counter()
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    if done.returncode != 0:
        last = done.stdout.strip().rpartition("\n")[2]
        raise UserError(f"{shlex.join(command)} ended with status {done.returncode}: {last}")
    return time.perf_counter() - started, done.stdout


def other(options: argparse.Namespace) -> list[str]:
    """The words of --vs."""
    program, *words = shlex.split(options.vs)
    return [sys.executable if program == "python" else program, *words]


def train(config: RunConfig, options: argparse.Namespace) -> Tasks:
    """Whole runs, without validation between the steps; the other program in pairs with them."""
    warmup, steps, tokens = options.warmup, options.warmup + options.steps, config.tokens_per_step() * config.devices
    limits = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", "trainer.log_every_n_steps=1"]
    limits.append(f"optim.schedule.warmup_steps={min(config.optim.schedule.warmup_steps, steps)}")

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run([*TRAIN, *options.settings, *limits, f"hydra.run.dir={folder}/run"])
            [metrics] = Path(folder).glob("run/csv/*/metrics.csv")
            rows = [row for row in csv.DictReader(metrics.open()) if row["train/tokens_per_second"]]
        return statistics.median(float(row["train/tokens_per_second"]) for row in rows if int(row["step"]) > warmup)

    def theirs() -> float:
        times = [float(ms) for ms in re.findall(STEP_TIME, run(other(options), options.vs_dir)[1])][warmup:steps]
        if not times:
            raise UserError(f"--vs prints no step {STEP_TIME!r} after the first {warmup}; lower --warmup")
        return (options.vs_tokens or tokens) / statistics.median(times) * 1000

    return {"tril": ours} | ({"other": theirs} if options.vs else {})


def decode(config: RunConfig, options: argparse.Namespace) -> Tasks:
    """Ids in, ids out, with the default sampling; a call of each before the first that counts."""
    from tril.model.generation.generate import generate_ids
    from tril.model.generation.sampling import SamplingConfig
    from tril.model.gpt import GPT
    from tril.model.runs import load

    assert config.hardware is not None
    device = config.hardware.accelerator
    configure_torch(device)
    lm = load(options.ckpt, device) if options.ckpt else None
    model = (GPT(config.model).to(device) if lm is None else lm.model).eval()
    n_ids = model.config.vocab_size if lm is None else lm.n_ids

    def seconds(new: int, batch: int, choices: dict[str, Any]) -> float:
        prompts = torch.randint(n_ids, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        started = time.perf_counter()
        for _ in generate_ids(model, prompts, SamplingConfig(max_new_tokens=new), vocab_size=n_ids, **choices):
            pass
        return time.perf_counter() - started

    def ours(batch: int, choices: dict[str, Any]) -> Callable[[], float]:
        def tokens_per_second() -> float:
            return batch * (LONG - SHORT) / (seconds(LONG, batch, choices) - seconds(SHORT, batch, choices))

        seconds(2, batch, choices)  # compiles
        return tokens_per_second

    def theirs() -> float:
        commands = ([word.replace("{n}", str(n)) for word in other(options)] for n in (SHORT, LONG))
        short, long = (run(command, options.vs_dir)[0] for command in commands)
        return (LONG - SHORT) / (long - short)

    modes: dict[str, dict[str, Any]] = {"cache": {}, "no cache": {"use_cache": False}}
    if config.hardware.compile:
        modes["compiled"] = {"compile": True}
    names = {f"{batch} x, {name}": (batch, choices) for name, choices in modes.items() for batch in (1, 64)}
    tasks = {name: ours(*case) for name, case in names.items() if name != "64 x, no cache"}
    return tasks | ({"other": theirs} if options.vs else {})


PARTS = {"train": train, "decode": decode}


if __name__ == "__main__":
    main()
