"""Measures Tril on this machine:  python -m tril.scripts.maintenance.bench PART [options] [key=value ...]

  train   tokens per second of whole training runs with these settings, the median over their steps
  decode  tokens per second of sampling by a model with random weights

--vs "COMMAND" trains with another program in the same pairs, which has as many tokens in a step and prints the
milliseconds of its steps as nanoGPT does. What is compared runs in alternating order, A B, B A, ...; the table has the
median, the smallest and the largest value, and the median ratio to the first row, taken in each repetition.
"""

import argparse
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tril.data.prepare import prepare
from tril.model.checkpoint import code_sha256
from tril.model.runs import Run
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, fail
from tril.scripts.cli.run import choose_hardware

STEP_TIME = r"time ([0-9.]+)ms"  # of a step, in the output of nanoGPT
PROMPT, SHORT, LONG = 16, 64, 64 + 512  # tokens; sampling counts the difference of a long and a short sample
Tasks = dict[str, Callable[[], float]]  # row of the table: one repetition


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as of train.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="of each run of `train`")
    parser.add_argument("--vs", metavar="COMMAND", help="of another program that trains, for the shell")
    options = parser.parse_intermixed_args(arguments)
    try:
        line = compose("train", options.settings)
        config = RunConfig.of(line.settings, line.given)
        config = config.complete(choose_hardware(config), prepare(config.data).meta["vocab_size"])
        config = config.decide_compilation()
        values = interleave(PARTS[options.part](config, options), options.repeats)
    except (UserError, OSError) as error:
        fail(error)
    assert (hardware := config.hardware) is not None
    machine = f"{hardware.device_name}, {torch.get_num_threads()} threads, {hardware.precision}"
    print(f"{machine}, torch {torch.__version__}, code {code_sha256()[:12]}\n\ntokens/s\n{table(values)}")


def interleave(tasks: Tasks, repeats: int) -> dict[str, list[float]]:
    """The values of each task, run in alternating order, so that a drift of the machine favors none."""
    values: dict[str, list[float]] = {name: [] for name in tasks}
    for repetition in range(repeats):
        for name in list(tasks)[:: -1 if repetition % 2 else 1]:
            values[name].append(tasks[name]())
        print(f"repetition {repetition + 1} of {repeats}", file=sys.stderr, flush=True)
    return values


def table(values: dict[str, list[float]]) -> str:
    """One row per task."""
    frame = pd.DataFrame(values)
    ratio = frame.div(frame.iloc[:, 0], axis=0).median()
    columns = {"median": frame.median(), "smallest": frame.min(), "largest": frame.max(), "ratio": ratio}
    return pd.DataFrame(columns).to_string(float_format=lambda x: f"{float(f'{x:.4g}'):,.10g}")


def run(*command: str) -> str:
    """The output of a process; raises UserError if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8")
    if done.returncode != 0:
        last = done.stdout.strip().rpartition("\n")[2]
        raise UserError(f"{shlex.join(command)} ended with status {done.returncode}: {last}")
    return done.stdout


def train(config: RunConfig, options: argparse.Namespace) -> Tasks:
    """Whole runs, without validation between the steps; the other program in pairs with them."""
    steps, tokens = options.steps, config.tokens_per_step() * config.devices
    limits = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}", "trainer.log_every_n_steps=1"]
    limits.append(f"optim.schedule.warmup_steps={min(config.optim.schedule.warmup_steps, steps)}")

    def ours() -> float:
        with tempfile.TemporaryDirectory() as folder:
            run(sys.executable, "-m", "tril.train", *options.settings, *limits, f"hydra.run.dir={folder}/run")
            return Run(Path(folder, "run")).summary["tokens_per_second"]

    def theirs() -> float:
        times = [float(ms) for ms in re.findall(STEP_TIME, run("sh", "-c", options.vs))]
        if not times:
            raise UserError(f"--vs={options.vs} prints no step {STEP_TIME!r}; let it log every step")
        return tokens / statistics.median(times) * 1000

    return {"tril": ours} | ({"other": theirs} if options.vs else {})


def decode(config: RunConfig, options: argparse.Namespace) -> Tasks:
    """Ids in, ids out, with the default sampling; a call of each before the first that counts."""
    from tril.model.generation.config import SamplingConfig
    from tril.model.generation.generate import generate_ids
    from tril.model.gpt import GPT

    assert config.hardware is not None
    device = config.hardware.accelerator
    model, n_ids = GPT(config.model).to(device).eval(), config.model.vocab_size

    def seconds(new: int, batch: int, choices: dict[str, Any]) -> float:
        prompts = torch.randint(n_ids, (batch, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
        started = time.perf_counter()
        for _ in generate_ids(model, prompts, SamplingConfig(max_new_tokens=new), vocab_size=n_ids, **choices):
            pass
        return time.perf_counter() - started

    def ours(batch: int, **choices: Any) -> Callable[[], float]:
        seconds(2, batch, choices)  # compiles
        return lambda: batch * (LONG - SHORT) / (seconds(LONG, batch, choices) - seconds(SHORT, batch, choices))

    tasks = {"1 x, cache": ours(1), "64 x, cache": ours(64), "1 x, no cache": ours(1, use_cache=False)}
    if config.hardware.compile:
        tasks |= {f"{batch} x, compiled": ours(batch, compile=True) for batch in (1, 64)}
    return tasks


PARTS = {"train": train, "decode": decode}


if __name__ == "__main__":
    main()
