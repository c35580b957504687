"""Another program beside ours: both as whole processes, in turn. Nothing of the other is known but its command and what it prints."""

import csv
import math
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.common.cli import UserError, quoted, user_errors

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
SHORT, LONG = 64, 64 + 512  # new tokens of the two calls of vs_sample, whose difference counts
PLACE = "{n}"  # of their number in vs_sample


def check(cfg: Mapping, names: Sequence[str]) -> None:
    """Raises ValueError or OSError for a command that cannot be started or read. names: the parts that will run."""
    for key, part in (("vs", "train"), ("vs_sample", "decode")):
        if cfg[key] is None:
            continue
        if part not in names:
            raise ValueError(f"{key} is timed in what={part}, which is not among what={','.join(names)}; add it")
        find_program(key, cfg[key], cfg["vs_dir"])
    if cfg["vs_sample"] is not None and PLACE not in cfg["vs_sample"]:
        raise ValueError(f"vs_sample={cfg['vs_sample']} lacks {PLACE}; write it where the number of new tokens stands")
    if cfg["vs_tokens"] is not None and (type(cfg["vs_tokens"]) is not int or cfg["vs_tokens"] < 1):
        raise ValueError(
            f"vs_tokens={cfg['vs_tokens']} must be a whole number of at least 1, or null: as many as in our step"
        )
    try:
        groups = re.compile(cfg["vs_pattern"]).groups
    except (re.error, TypeError) as error:
        raise ValueError(f"vs_pattern={cfg['vs_pattern']} is no regular expression ({error})") from error
    if groups != 1:
        raise ValueError(
            f"vs_pattern={cfg['vs_pattern']} has {groups} groups; it needs one, around the milliseconds: 'time ([0-9.]+)ms'"
        )


def find_program(key: str, command: str, folder: str | None) -> None:
    """Raises ValueError where the command or the folder that it is started in is not there."""
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"vs_dir={folder} is no folder; give the one that the command of {key} is typed in")
    try:
        program = arguments(command)[0]
    except (ValueError, IndexError) as error:
        raise ValueError(f"{key}={command} is no command ({error})") from error
    if shutil.which(program) is None and not Path(folder or ".", program).is_file():
        raise ValueError(f"{key}: there is no program {program}; name one that can be started without a shell")


def arguments(command: str) -> list[str]:
    """The words of a command line; `python` is the one that runs this."""
    program, *rest = shlex.split(command)
    return [sys.executable if program == "python" else program, *rest]


def run(name: str, command: Sequence[str], folder: str | Path | None = None) -> tuple[float, str]:
    """Seconds of the whole process, and what it printed. Raises UserError where it fails."""
    started = time.perf_counter()
    with user_errors():
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    if done.returncode != 0:
        raise UserError(f"{name} ended with status {done.returncode}: {last_line(done.stdout)}")
    return time.perf_counter() - started, done.stdout


def last_line(text: str) -> str:
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "(it printed nothing)")


def training(bench: Bench) -> Section:
    """`python train.py` under these settings, and the other program."""
    prepare(bench)
    runs = {"ours": partial(our_run, bench), "theirs": partial(their_run, bench.cfg, bench.warmup, bench.steps)}
    tokens = {"ours": bench.plan.tokens_per_step(), "theirs": bench.cfg["vs_tokens"] or bench.plan.tokens_per_step()}
    whole: dict[str, list[float]] = {name: [] for name in runs}

    def repetition(name: str) -> float:
        step, seconds = runs[name]()
        whole[name].append(seconds)
        print(f"vs: {name} {1000 * step:.4g} ms per step, {seconds:.1f} s in all", file=sys.stderr, flush=True)
        return step

    from tril.scripts.benchmarks.timing import interleaved, paired_ratio  # torch: not for `check`

    steps = interleaved({name: partial(repetition, name) for name in runs}, bench.repeats, "vs")
    speeds = {name: [tokens[name] / step for step in steps[name]] for name in runs}
    ratio = dict(zip(("median", "smallest", "largest"), paired_ratio(speeds["ours"], speeds["theirs"])))
    rows = []
    for name in runs:
        row = {
            "program": name,
            "tokens per step": tokens[name],
            "ms per step (median)": 1000 * statistics.median(steps[name]),
        }
        row |= {"tokens/s": statistics.median(speeds[name])}
        row |= {f"tokens/s, ours / theirs, {key}": value if name == "ours" else None for key, value in ratio.items()}
        rows.append(row | {"whole process (s)": statistics.median(whole[name])})
    samples = {f"seconds per step, {name}": values for name, values in steps.items()}
    samples |= {f"seconds of the process, {name}": values for name, values in whole.items()}
    notes = [
        f"{bench.repeats} pairs of whole processes, in turn; of each process the median step after {bench.warmup}. Ours: {bench.steps} "
        "steps of `python train.py` with Lightning, callbacks and logger, from its metrics.csv, in which validation does not count. "
        "Theirs: what vs_pattern finds in its output.",
        f"The whole process of ours: imports, certificate, {bench.warmup} + {bench.steps} steps, all of validation, "
        "heads, sample and checkpoints, with the data already prepared. Of theirs: all that its command does.",
        f"Theirs: `{bench.cfg['vs']}`",
    ]
    return Section("train", "Training: whole programs", rows, samples, notes, partial(draw, speeds))


def prepare(bench: Bench) -> None:
    """The data of our processes, so that none of them has to."""
    from tril.data.prepare import prepare

    data = bench.plan.data
    with user_errors():
        prepare(
            data.source,
            data.tokenizer,
            data.cache_dir,
            token_budget=data.token_budget,
            val_token_budget=data.val_token_budget,
        )


def our_run(bench: Bench) -> tuple[float, float]:
    """Seconds of the median step, and of the whole process."""
    folder = bench.folder / f"train-{time.time_ns()}"
    seconds, _ = run("python train.py", our_command(bench, folder))
    with (folder / "csv" / "version_0" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        speeds = [float(row["train/tokens_per_second"]) for row in csv.DictReader(file) if timed(row, bench.warmup)]
    return bench.plan.tokens_per_step() / statistics.median(speeds), seconds


def timed(row: Mapping[str, str], warmup: int) -> bool:
    """Whether a row of metrics.csv tells the speed of steps after the warm-up."""
    return bool(row["train/tokens_per_second"]) and int(row["step"]) > warmup


def our_command(bench: Bench, folder: Path) -> list[str]:
    """train.py with the settings of this benchmark. A row of its csv ends where the warm-up does, so that none covers both."""
    trainer, steps = bench.cfg["trainer"], bench.warmup + bench.steps
    typed = [override for override in bench.overrides if override.partition("=")[0] != "logger"]
    return [
        sys.executable,
        str(TRAIN),
        *typed,
        "logger=csv",
        f"trainer.max_steps={steps}",
        f"trainer.log_every_n_steps={math.gcd(bench.warmup, trainer['log_every_n_steps'])}",
        f"optim.schedule.warmup_steps={min(bench.cfg['optim']['schedule']['warmup_steps'], steps)}",  # it may not be longer than the run
        quoted(f"hydra.run.dir={folder}", ("hydra.run.dir",)),
    ]


def their_run(cfg: Mapping, warmup: int, steps: int) -> tuple[float, float]:
    """Seconds of the median step, and of the whole process. Raises UserError where it fails or says too little."""
    seconds, printed = run("vs", arguments(cfg["vs"]), cfg["vs_dir"])
    found = [float(ms) for ms in re.findall(cfg["vs_pattern"], printed)]
    if len(found) <= warmup:
        raise UserError(
            f"vs_pattern={cfg['vs_pattern']} is found {len(found)} times in what vs printed, and warmup={warmup} of them do not count; "
            f"let it run and print more steps, or change vs_pattern or warmup; its last line: {last_line(printed)}"
        )
    return statistics.median(found[warmup : warmup + steps]) / 1000, seconds


def sampling_seconds_per_token(bench: Bench) -> float:
    """Of one new token of the program `vs_sample`: what a longer sample takes more than a short one, so that its start-up drops out."""
    short, long = (
        run("vs_sample", sampling_command(bench.cfg["vs_sample"], n), bench.cfg["vs_dir"])[0] for n in (SHORT, LONG)
    )
    if long <= short:
        took = f"{long:.2f} s for {LONG} tokens and {short:.2f} s for {SHORT}"
        raise UserError(f"vs_sample takes {took}; put {PLACE} where their number stands")
    return (long - short) / (LONG - SHORT)


def sampling_command(command: str, n: int) -> list[str]:
    return [word.replace(PLACE, str(n)) for word in arguments(command)]


def draw(speeds: Mapping[str, Sequence[float]], axes) -> None:
    """The speed of both programs, pair by pair."""
    for name, values in speeds.items():
        axes.plot(range(1, len(values) + 1), values, "o-", label=name)
    axes.set(title="Whole programs", xlabel="pair", ylabel="tokens/s", ylim=(0, 1.1 * axes.get_ylim()[1]))
    axes.set_xticks(range(1, len(speeds["ours"]) + 1))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(fontsize=8, loc="lower right")
