"""what=start: seconds from the start of a process until it produces what the user waits for."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tril.data.prepared import PreparedTexts
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.model.runs import find_checkpoint
from tril.scripts.benchmarks import processes
from tril.scripts.benchmarks.decoding import random_model
from tril.scripts.benchmarks.section import Bench, Plot, Section, by_number
from tril.scripts.benchmarks.timing import interleaved, spread
from tril.scripts.cli.config import with_vocabulary
from tril.scripts.cli.errors import UserError, user_errors

STEP_LINE = b"step "  # how a line of callbacks.progress begins


def run(bench: Bench) -> list[Section]:
    ckpt = bench.config.ckpt
    with user_errors():
        prepared = bench.run_config.data.prepare()  # train.py finds the data prepared
        checkpoint = random_checkpoint(bench, prepared) if ckpt is None else find_checkpoint(ckpt).resolve()
    sample = [*processes.SAMPLE, f"ckpt={checkpoint}", f"device={bench.device}", "prompt="]
    tasks = {
        "python: exit": partial(exit_seconds, sys.executable, "-c", "pass"),
        "import torch: exit": partial(exit_seconds, sys.executable, "-c", "import torch"),
        "train.py --help: exit": partial(exit_seconds, *processes.TRAIN, "--help"),
        "train.py: first step": partial(seconds_until, bench, train_command(bench), STEP_LINE),
        "scripts/sample.py: first token": partial(seconds_until, bench, sample),
    }
    times = interleaved(tasks, bench.config.repeats, "start")
    rows = [{"what": name} | spread(values, "s ({})") for name, values in times.items()]
    notes = [
        f"{bench.config.repeats} processes of each in alternating order, with files that are in the page cache.",
        "First step: until the line of callbacks.progress after the first optimizer step, with the data prepared, with "
        f"causality certificate{' and compilation' if bench.hardware.compile else ''}.",
        f"First token: until the first byte of text, with an empty prompt; {ckpt or 'a model with random weights'}.",
    ]
    return [Section("start", "Start of a process", rows, times, notes, Plot(by_number(times), "process", "seconds"))]


def random_checkpoint(bench: Bench, prepared: PreparedTexts) -> Path:
    """Saves a checkpoint of the configured model with random weights and the tokenizer of the data."""
    path = bench.folder / "random.ckpt"
    chosen = replace(bench.run_config.model, vocab_size=bench.cfg["model"]["vocab_size"])
    model = random_model(bench, with_vocabulary(chosen, prepared.meta["vocab_size"]))
    save(path, LanguageModel(model, prepared.tokenizer, bench.run_config.data.tokenizer.eot))
    return path


def train_command(bench: Bench) -> list[str]:
    return [
        *processes.TRAIN,
        *bench.overrides,
        "trainer.log_every_n_steps=1",
        f"callbacks.progress.lines={bench.run_config.steps}",
        f"hydra.run.dir={bench.folder / 'start'}",
    ]


def exit_seconds(*command: str) -> float:
    """Seconds of the whole process."""
    return processes.run("python", command)[0]


def seconds_until(bench: Bench, command: Sequence[str], prefix: bytes = b"") -> float:
    """Seconds until the process prints a line that starts with `prefix`, or anything. The process is then killed.

    Raises:
        UserError: the process ends earlier.
    """
    with (bench.folder / "stderr.txt").open("w+b") as errors:
        started = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout is not None
            complete = any(line.startswith(prefix) for line in process.stdout) if prefix else process.stdout.read(1)
            seconds = time.perf_counter() - started
            process.kill()
        errors.seek(0)
        if not complete:
            message = processes.last_line(errors.read().decode(errors="replace"))
            raise UserError(f"{command[2]} ended too early: {message}")
    return seconds
