"""Measures Tril on one GPU in at most nine minutes, and prints one table:

    python -m tril.scripts.maintenance.gpu
    python -m tril.scripts.maintenance.gpu --nanogpt FOLDER         # next to nanoGPT, a clone with its data prepared
    python -m tril.scripts.maintenance.gpu --device cpu --small     # the same commands with tiny sizes, to try them

The text is the standard library of Python, so no network is needed. Each part gets the time that is left; a part that
fails or does not fit is a row that says so.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tril.model.checkpoint import PACKAGE
from tril.model.formats import engineering
from tril.model.runs import Run

MINUTES = 9.0
COMPILE = ("false", "true", "regional", "reduce-overhead")  # the last one needs CUDA
SMALL = (  # every part in seconds on a CPU
    "model.n_layers=1",
    "model.dim=32",
    "model.n_heads=2",
    "model.context_length=32",
    "data.batch_size=2",
    "data.token_budget=50000",
    "data.val_token_budget=2000",
    "~callbacks.causality",
    "~callbacks.heads",
)


Part = tuple[str, Sequence[str], Callable[[str], str]]  # name, command after `python -m`, output -> text of the table


def parts(folder: Path, device: str, nanogpt: str | None, *, small: bool) -> Iterator[Part]:
    """All parts, the most important ones first.

    Args:
        folder: for the runs.
        nanogpt: the folder of nanoGPT; None: it is left out.
    """
    on_cpu, tiny, steps = device == "cpu", SMALL if small else (), 20 if small else 300
    limits = [f"trainer.accelerator={device}", *tiny]

    def training(name: str, *settings: str, steps: int = steps) -> Part:
        run = folder / name
        last = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps}"] if steps else []
        words = ["tril.train", "data=stdlib", *settings, *limits, *last, f"hydra.run.dir={run}"]
        return name, words, lambda output: describe(Run(run))

    tests = [f"{PACKAGE}/tests/model/training/test_optim.py", f"{PACKAGE}/tests/test_another_device.py"]
    yield "tests", ["pytest", "-n0", *tests], last_line
    for value in COMPILE[: 3 if on_cpu else 4]:
        yield training(f"compile={value}", f"compile={value}")
        if value != "false":
            yield training(f"compile={value}, again", f"compile={value}")
    shape = ("experiment=gpt2_124m", "optim.schedule.warmup_steps=0", "compile=true")  # 0.5 M tokens a step
    yield training("124M", *shape, steps=2 if small else 24)
    checked = [f"ckpt={folder / 'compile=false'}", f"device={device}", "budget_seconds=10", f"out={folder}"]
    verdict = lambda output: json.loads((folder / "causality.json").read_text())["verdict"]  # noqa: E731
    yield "certificate", ["tril.scripts.certify", *checked], verdict
    bench = "tril.scripts.maintenance.bench"
    yield "sampling", [bench, "decode", "--repeats=2", "compile=true", *limits], rows
    if nanogpt is not None:
        program = f"{sys.executable} train.py config/train_shakespeare_char.py --max_iters=100 --log_interval=1"
        other = f"--vs=cd {shlex.quote(nanogpt)} && {program}"
        yield (
            "nanoGPT's recipe",
            [bench, "train", "--repeats=3", "experiment=shakespeare_nanogpt_gpu", *limits, other],
            rows,
        )
    yield training("minutes=1", "minutes=1", steps=0)


def describe(run: Run) -> str:
    """The speed of a run, and when its first steps were done."""
    summary, rows = run.summary, [row for row in run.metrics if "train/seconds" in row]
    speed, share = engineering(summary["tokens_per_second"]), summary["mfu"]
    mfu = "" if share is None or math.isnan(share) else f", MFU {share:.1%}"
    spent = f"{rows[0]['step']} steps after {rows[0]['train/seconds']:.0f} s, all after {summary['seconds']:.0f} s"
    used = f"{summary['peak_memory_gb']:.1f} GB; {spent}"
    return f"{speed} tokens/s{mfu}, {used}; {summary['final_val_bpb']:.4f} bits per byte"


def last_line(output: str) -> str:
    return output.strip().rpartition("\n")[2]


def rows(output: str) -> str:
    """The rows of a benchmark without the heading: tokens/s, smallest, largest, ratio to the first row."""
    return "; ".join(" ".join(line.split()) for line in output.rpartition("ratio\n")[2].splitlines())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes")
    parser.add_argument("--nanogpt", metavar="FOLDER", help="a clone of nanoGPT")
    options, end = parser.parse_args(arguments), time.monotonic() + 60 * MINUTES
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        empty = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}  # each mode has its own code
        for name, words, result in parts(Path(folder), options.device, options.nanogpt, small=options.small):
            command, left = [sys.executable, "-m", *words], max(end - time.monotonic(), 0)
            try:
                done = subprocess.run(command, env=empty, capture_output=True, encoding="utf-8", timeout=left)
                failed = f"FAILED: {last_line(done.stdout + done.stderr)}"
                results[name] = failed if done.returncode else result(done.stdout)
            except subprocess.TimeoutExpired:
                results[name] = "no time left"
            print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    print("| part | result |", "|---|---|", *(f"| {name} | {result} |" for name, result in results.items()), sep="\n")


if __name__ == "__main__":
    main()
