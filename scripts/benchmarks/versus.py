"""Compares Tril with another program, of which it knows the command and the output. Both run as whole processes."""

import csv
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path

from tril.data.prepare import PreparedText, prepare
from tril.scripts.benchmarks.bench_config import COUNT, BenchConfig
from tril.scripts.benchmarks.bench_plot import Plot, by_number
from tril.scripts.benchmarks.processes import TRAIN, last_line, run, split_command
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import interleaved, paired_ratio
from tril.scripts.common.cli import UserError, quoted, user_errors

SHORT, LONG = 64, 64 + 512  # new tokens in the two calls of vs_sample; the difference of their times counts
RATIO = "tokens/s, tril / other"


def training(bench: Bench) -> Section:
    """`python train.py` with these settings, and the program `vs`."""
    prepare_data(bench)
    runs = {"tril": partial(run_tril, bench), "other": partial(run_other, bench.config)}
    ours = bench.run_config.tokens_per_step()
    tokens = {"tril": ours, "other": bench.config.vs_tokens or ours}
    process_seconds: dict[str, list[float]] = {name: [] for name in runs}

    def repetition(name: str) -> float:
        step, seconds = runs[name]()
        process_seconds[name].append(seconds)
        print(f"vs: {name} {1000 * step:.4g} ms per step, {seconds:.1f} s in all", file=sys.stderr, flush=True)
        return step

    steps = interleaved({name: partial(repetition, name) for name in runs}, bench.config.repeats, "vs")
    speeds = {name: [tokens[name] / step for step in steps[name]] for name in runs}
    ratio = paired_ratio(speeds["tril"], speeds["other"])
    rows = [
        {
            "program": name,
            "tokens per step": tokens[name],
            "ms per step (median)": 1000 * statistics.median(steps[name]),
            "tokens/s": statistics.median(speeds[name]),
            **{f"{RATIO}, {key}": value if name == "tril" else None for key, value in ratio.items()},
            "whole process (s)": statistics.median(process_seconds[name]),
        }
        for name in runs
    ]
    samples = {f"seconds per step, {name}": values for name, values in steps.items()}
    samples |= {f"seconds of the process, {name}": values for name, values in process_seconds.items()}
    plot = Plot(by_number(speeds), "pair", "tokens/s")
    return Section("train", "Training: whole programs", rows, samples, training_notes(bench.config), plot)


def training_notes(config: BenchConfig) -> list[str]:
    return [
        f"{config.repeats} pairs of whole processes in alternating order; of each the median of {config.steps} steps "
        f"after {config.warmup} of warm-up. tril: from metrics.csv, without validation. other: from its output.",
        "Whole process of tril: with imports, certificate, validation, sample and checkpoints; the data are prepared.",
        f"other: `{config.vs}`",
    ]


def prepare_data(bench: Bench) -> PreparedText:
    """Prepares the data of our processes before the first of them starts."""
    data = bench.run_config.data
    with user_errors():
        return prepare(
            data.source,
            data.tokenizer,
            data.cache_dir,
            token_budget=data.token_budget,
            val_token_budget=data.val_token_budget,
        )


def run_tril(bench: Bench) -> tuple[float, float]:
    """Seconds of the median step, and of the whole process."""
    folder = bench.folder / f"train-{time.time_ns()}"
    seconds, _ = run("python train.py", train_command(bench, folder))
    with (folder / "csv" / "version_0" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/tokens_per_second"]]
    speeds = [float(row["train/tokens_per_second"]) for row in rows if int(row["step"]) > bench.config.warmup]
    return bench.run_config.tokens_per_step() / statistics.median(speeds), seconds


def train_command(bench: Bench, folder: Path) -> list[str]:
    """train.py with the settings of this benchmark. No row of its metrics.csv mixes the warm-up with later steps."""
    trainer, warmup, steps = bench.cfg["trainer"], bench.config.warmup, bench.config.warmup + bench.config.steps
    typed = [override for override in bench.overrides if override.partition("=")[0] != "logger"]
    return [
        *TRAIN,
        *typed,
        "logger=csv",
        f"trainer.max_steps={steps}",
        f"trainer.log_every_n_steps={math.gcd(warmup, trainer['log_every_n_steps'])}",
        # warm-up of the learning rate, at most as long as the run
        f"optim.schedule.warmup_steps={min(bench.cfg['optim']['schedule']['warmup_steps'], steps)}",
        quoted(f"hydra.run.dir={folder}", ("hydra.run.dir",)),
    ]


def run_other(config: BenchConfig) -> tuple[float, float]:
    """Seconds of the median step, and of the whole process.

    Raises:
        UserError: the program fails, or its output has no step after the warm-up.
    """
    assert config.vs is not None
    seconds, output = run("vs", split_command(config.vs), config.vs_dir)
    milliseconds = [float(ms) for ms in config.vs_pattern.findall(output)]
    if len(milliseconds) <= config.warmup:
        raise UserError(
            f"vs_pattern={config.vs_pattern.pattern} matches {len(milliseconds)} steps in the output of vs, of which "
            f"the first warmup={config.warmup} do not count; let it print more steps, or change vs_pattern or warmup; "
            f"its last line: {last_line(output)}"
        )
    return statistics.median(milliseconds[config.warmup : config.warmup + config.steps]) / 1000, seconds


def sampling_seconds_per_token(config: BenchConfig) -> float:
    """Time of one new token of `vs_sample`: the difference of a long and a short sample, so without start-up."""
    assert config.vs_sample is not None
    short, long = (run("vs_sample", sampling_command(config.vs_sample, n), config.vs_dir)[0] for n in (SHORT, LONG))
    if long <= short:
        times = f"{long:.2f} s for {LONG} tokens and {short:.2f} s for {SHORT}"
        raise UserError(f"vs_sample takes {times}; write {COUNT} in place of the number of new tokens")
    return (long - short) / (LONG - SHORT)


def sampling_command(command: str, n: int) -> list[str]:
    return [word.replace(COUNT, str(n)) for word in split_command(command)]
