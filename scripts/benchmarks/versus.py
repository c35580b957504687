"""Compares Tril with another program, of which it knows the command and the output. Both run as whole processes."""

import csv
import math
import statistics
import time
from functools import partial
from pathlib import Path

from tril.scripts.benchmarks.bench_config import COUNT, BenchConfig
from tril.scripts.benchmarks.processes import TRAIN, last_line, run, split_command
from tril.scripts.benchmarks.section import Bench, Plot, Section, by_number
from tril.scripts.benchmarks.timing import interleaved, paired_ratio
from tril.scripts.cli.errors import UserError, user_errors

SHORT, LONG = 64, 64 + 512  # new tokens in the two calls of vs_sample; the difference of their times counts
RATIO = "tokens/s, tril / other, {}"  # columns of `paired_ratio`


def training(bench: Bench) -> Section:
    """`python train.py` with these settings, and the program `vs`."""
    with user_errors():
        bench.run_config.data.prepare()  # before the first of our processes starts
    config, ours = bench.config, bench.run_config.tokens_per_step()
    tokens = {"tril": ours, "other": config.vs_tokens or ours}
    results = interleaved({"tril": partial(run_tril, bench), "other": partial(run_other, config)}, config.repeats, "vs")
    steps = {name: [step for step, _ in pairs] for name, pairs in results.items()}
    processes = {name: [seconds for _, seconds in pairs] for name, pairs in results.items()}
    speeds = {name: [tokens[name] / step for step in steps[name]] for name in tokens}
    ratio = paired_ratio(speeds["tril"], speeds["other"], RATIO)
    rows = [
        {
            "program": name,
            "tokens per step": tokens[name],
            "ms per step (median)": 1000 * statistics.median(steps[name]),
            "tokens/s": statistics.median(speeds[name]),
            **(ratio if name == "tril" else dict.fromkeys(ratio)),
            "whole process (s)": statistics.median(processes[name]),
        }
        for name in tokens
    ]
    samples = {f"seconds per step, {name}": values for name, values in steps.items()}
    samples |= {f"seconds of the process, {name}": values for name, values in processes.items()}
    notes = [
        f"{config.repeats} pairs of whole processes in alternating order; of each the median of {config.steps} steps "
        f"after {config.warmup} of warm-up. tril: from metrics.csv, without validation. other: from its output.",
        "Whole process of tril: with imports, certificate, validation, sample and checkpoints; the data are prepared.",
        f"other: `{config.vs}`",
    ]
    plot = Plot(by_number(speeds), "pair", "tokens/s")
    return Section("train", "Training: whole programs", rows, samples, notes, plot)


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
    warmup, steps = bench.config.warmup, bench.config.warmup + bench.config.steps
    lr_warmup = min(bench.run_config.optim.schedule.warmup_steps, steps)  # at most as long as the run
    return [
        *TRAIN,
        *(override for override in bench.overrides if not override.startswith("logger=")),
        "logger=csv",
        f"trainer.max_steps={steps}",
        f"trainer.log_every_n_steps={math.gcd(warmup, bench.run_config.trainer.log_every_n_steps)}",
        f"optim.schedule.warmup_steps={lr_warmup}",
        f"hydra.run.dir={folder}",
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
    words = split_command(config.vs_sample)
    commands = ([word.replace(COUNT, str(n)) for word in words] for n in (SHORT, LONG))
    short, long = (run("vs_sample", command, config.vs_dir)[0] for command in commands)
    if long <= short:
        times = f"{long:.2f} s for {LONG} tokens and {short:.2f} s for {SHORT}"
        raise UserError(f"vs_sample takes {times}; write {COUNT} in place of the number of new tokens")
    return (long - short) / (LONG - SHORT)
