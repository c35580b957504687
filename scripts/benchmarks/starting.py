"""what=start: seconds from the start of a process to what its user waits for."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch

from tril.data.prepare import PreparedText, prepare
from tril.model.causality.subject import randomise
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.model.gpt import GPT
from tril.model.runs import find_checkpoint
from tril.scripts.benchmarks import versus
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import interleaved
from tril.scripts.common.cli import UserError, quoted, user_errors
from tril.scripts.common.run_config import vocabulary

SAMPLE = versus.TRAIN.parent / "scripts" / "sample.py"
FIRST_STEP = b"step "  # how a line of callbacks.progress begins


def run(bench: Bench) -> list[Section]:
    data = bench.plan.data
    budgets = {"token_budget": data.token_budget, "val_token_budget": data.val_token_budget}
    with user_errors():
        packed = prepare(data.source, data.tokenizer, data.cache_dir, **budgets)
        checkpoint = (
            fresh(bench, packed) if bench.cfg["ckpt"] is None else find_checkpoint(str(bench.cfg["ckpt"])).resolve()
        )
    tasks = {
        "python: ended": partial(ended, "-c", "pass"),
        "import torch: ended": partial(ended, "-c", "import torch"),
        "train.py --help: ended": partial(ended, str(versus.TRAIN), "--help"),
        "train.py: first step done": partial(until, bench, "train.py", train_command(bench), first_step),
        "scripts/sample.py: first token": partial(
            until, bench, "scripts/sample.py", sample_command(bench, checkpoint), first_byte
        ),
    }
    times = interleaved(tasks, bench.repeats, "start")
    rows = [
        {"what": name, "s (median)": statistics.median(v), "s (smallest)": min(v), "s (largest)": max(v)}
        for name, v in times.items()
    ]
    notes = [
        f"{bench.repeats} processes of each, in turn, from before the process is made; files that they read are in the system's memory.",
        "The first step: until the line of callbacks.progress after the first optimizer step arrives, with the data prepared beforehand, "
        "trainer.log_every_n_steps=1 and a line for every step; the certificate before training"
        + (" and compilation are" if bench.plan.hardware.compile else " is")
        + " part of it.",
        "The first token: until the first byte of the text arrives, with an empty prompt, from "
        + ("a model with random weights." if bench.cfg["ckpt"] is None else f"{bench.cfg['ckpt']}."),
    ]
    return [Section("start", "Start of a process", rows, times, notes, partial(draw, times))]


def fresh(bench: Bench, packed: PreparedText) -> Path:
    """A checkpoint of the configured model with random weights and the tokenizer of the data."""
    size = vocabulary(bench.cfg["model"]["vocab_size"], packed.meta["vocab_size"])
    torch.manual_seed(bench.cfg["seed"])
    model = randomise(GPT(replace(bench.plan.model, vocab_size=size)))
    save(bench.folder / "fresh.ckpt", LanguageModel(model, packed.tokenizer, bench.plan.data.tokenizer.eot))
    return bench.folder / "fresh.ckpt"


def train_command(bench: Bench) -> list[str]:
    return [
        sys.executable,
        str(versus.TRAIN),
        *bench.overrides,
        "trainer.log_every_n_steps=1",
        f"callbacks.progress.lines={bench.plan.steps}",
        quoted(f"hydra.run.dir={bench.folder / 'start'}", ("hydra.run.dir",)),
    ]


def sample_command(bench: Bench, checkpoint: Path) -> list[str]:
    return [sys.executable, str(SAMPLE), f"ckpt={checkpoint}", f"device={bench.device}", "prompt="]


def ended(*arguments: str) -> float:
    """Seconds of the whole process."""
    return versus.run("python", [sys.executable, *arguments])[0]


def first_step(stdout: BinaryIO) -> bool:
    return any(line.startswith(FIRST_STEP) for line in stdout)


def first_byte(stdout: BinaryIO) -> bool:
    return stdout.read(1) != b""


def until(bench: Bench, name: str, command: Sequence[str], reached: Callable[[BinaryIO], bool]) -> float:
    """Seconds until `reached` has read what it waits for, and the process is killed. Raises UserError where it ends before that."""
    with (bench.folder / "stderr.txt").open("w+b") as errors:
        started = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            there = reached(process.stdout)
            seconds = time.perf_counter() - started
            process.kill()
        errors.seek(0)
        if not there:
            raise UserError(f"{name} ended too early: {versus.last_line(errors.read().decode(errors='replace'))}")
    return seconds


def draw(times: dict[str, list[float]], axes) -> None:
    """A bar for the median, a dot for every process."""
    medians = {name.replace(": ", "\n"): statistics.median(values) for name, values in times.items()}
    axes.barh(list(medians), list(medians.values()), color="tab:blue", alpha=0.5)
    for place, values in enumerate(times.values()):
        axes.plot(values, [place] * len(values), "o", ms=3, color="tab:blue")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set(title="Start of a process", xlabel="seconds")
