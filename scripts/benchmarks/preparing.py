"""what=data: how fast text becomes tokens, and how much memory that takes. Each repetition is a process of its own."""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from tril.data import prepare as packing
from tril.data.sources.files import Files
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.versus import last_line
from tril.scripts.common.cli import UserError

ROOT = Path(__file__).resolve().parents[2]
SIZES = (30_000_000, 100_000_000)  # bytes of text; two, to see whether memory grows with it
STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux, man 5 proc: writing 5 resets the peak of the resident size


def run(bench: Bench) -> list[Section]:
    from tril.scripts.benchmarks.timing import (
        interleaved,  # imports torch, which is to be no part of the worker's memory
    )

    config = bench.plan.data.tokenizer
    if config.kind == "file":
        config = replace(config, path=str(Path(config.path).expanduser().resolve()))  # the worker starts elsewhere
    found: dict[int, list[dict]] = {size: [] for size in SIZES}

    def repetition(size: int, text: Path) -> float:
        found[size].append(prepared(text, config))
        return found[size][-1]["encoding (s)"]

    tasks = {
        f"{size}": partial(repetition, size, write_text(bench.folder / f"text-{size}.txt", size)) for size in SIZES
    }
    interleaved(tasks, bench.repeats, "data")
    rows = [row for size in SIZES for row in stages(found[size], config)]
    samples = {
        f"{name}, {size / 1e6:g} MB": [each[name] for each in found[size]] for size in SIZES for name in found[size][0]
    }
    notes = [
        f"The text: one file with the sources of Python's standard library, repeated up to that size; tokenizer: {config.kind}.",
        f"The median of {bench.repeats} processes, each with an empty cache folder; without imports. MB/s: of what the stage reads.",
        "Memory: the largest resident size of the process in that stage, and what Python and the libraries had before it (on Linux alone).",
        "Second start: the same call when everything is there, with the check that the text is the same.",
    ]
    return [Section("data", "Preparing text", rows, samples, notes)]


def stages(found: list[dict], config: TokenizerConfig) -> list[dict]:
    """The rows of one size of text."""
    middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
    total, trained_on = middle["text (bytes)"], middle["training part (bytes)"]
    sizes = {"training the tokenizer": trained_on, "encoding": total, "second start": None}
    if config.kind == "bpe":
        sizes["training the tokenizer"] = min(trained_on, config.train_bytes)
    elif config.kind != "char":
        del sizes["training the tokenizer"]  # it reads no text
    rows = []
    for stage, size in sizes.items():
        seconds, peak = middle[f"{stage} (s)"], middle.get(f"{stage}: peak memory (bytes)")
        rows.append(
            {
                "text (MB)": total / 1e6,
                "stage": stage,
                "seconds": seconds,
                "MB/s": size and size / 1e6 / seconds,
                "peak memory (MB)": peak and peak / 1e6,
                "of it before the start (MB)": peak and middle["before: memory (bytes)"] / 1e6,
            }
        )
    return rows


def write_text(path: Path, size: int) -> Path:
    """The sources of the standard library, again and again, until there are `size` bytes."""
    left = size
    with path.open("wb") as file:
        while left > 0:
            for piece in StandardLibrary().pieces("train"):
                content = piece.text.encode()[:left]
                left -= file.write(content)
    return path


def prepared(text: Path, config: TokenizerConfig) -> dict[str, float]:
    """What `measure` found in a process of its own."""
    command = [sys.executable, "-m", __name__, str(text.resolve()), json.dumps(asdict(config))]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode:
        raise UserError(f"preparing the text failed: {last_line(done.stderr)}")
    return json.loads(done.stdout)


def measure(text: Path, config: TokenizerConfig, cache_dir: str) -> dict[str, float]:
    """Seconds and peak memory of `data.packing.prepare`, its tokenizer apart from the rest, and of a second call."""
    figures = {"before: memory (bytes)": peak_memory()}

    def stage(name: str, task: Callable, *arguments):
        reset_peak_memory()
        started = time.perf_counter()
        result = task(*arguments)
        figures[f"{name} (s)"] = time.perf_counter() - started
        figures[f"{name}: peak memory (bytes)"] = peak_memory()
        return result

    def timed_build(*arguments):
        tokenizer = stage("training the tokenizer", build, *arguments)
        reset_peak_memory()  # what follows is encoding
        return tokenizer

    build, prepare = packing.build, partial(packing.prepare, Files(str(text)), config, cache_dir, progress=False)
    packing.build = timed_build
    try:
        packed = stage("encoding", prepare)
    finally:
        packing.build = build
    figures["encoding (s)"] -= figures["training the tokenizer (s)"]
    stage("second start", prepare)
    counts = packed.meta["counts"]
    figures |= {
        "text (bytes)": counts["train"]["bytes"] + counts["val"]["bytes"],
        "training part (bytes)": counts["train"]["bytes"],
    }
    return {name: value for name, value in figures.items() if value is not None}


def reset_peak_memory() -> None:
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_memory() -> int | None:
    """Bytes, on Linux; elsewhere a process is told what its parent had, if that was more."""
    return int(STATUS.read_text().split("VmHWM:")[1].split()[0]) * 1024 if STATUS.is_file() else None


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(sys.argv[1]), TokenizerConfig(**json.loads(sys.argv[2])), folder)))
