"""what=data: how fast text becomes tokens, and how much memory that takes. Each repetition is a separate process."""

import json
import statistics
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.benchmarks.processes import last_line
from tril.scripts.benchmarks.processes import run as run_process
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import interleaved

SIZES = (30_000_000, 100_000_000)  # bytes of text; two, to see whether memory grows with the text
WORKER = (sys.executable, "-m", "tril.scripts.benchmarks.prepare_worker")


def run(bench: Bench) -> list[Section]:
    config = bench.run_config.data.tokenizer
    texts = {size: write_text(bench.folder / f"text-{size}.txt", size) for size in SIZES}
    tasks = {size: partial(measure, text, config) for size, text in texts.items()}
    figures = interleaved(tasks, bench.config.repeats, "data")
    samples = {
        f"{name}, {size / 1e6:g} MB": [repetition[name] for repetition in repetitions]
        for size, repetitions in figures.items()
        for name in repetitions[0]
    }
    notes = [
        f"The text: the sources of Python's standard library, repeated up to that size; tokenizer: {config.kind}.",
        f"The median of {bench.config.repeats} processes, each with an empty cache folder, without imports.",
        "MB/s: of the text that the stage reads. Memory: the largest resident size in the stage, and the size before "
        "the first stage, with Python and the libraries loaded (Linux only).",
        "Second start: the same call when the tokens are cached, including the check that the text is unchanged.",
    ]
    rows = [row for repetitions in figures.values() for row in stages(repetitions, config)]
    return [Section("data", "Preparing text", rows, samples, notes)]


def stages(repetitions: list[dict[str, float]], config: TokenizerConfig) -> list[dict]:
    """The rows of one size of text, from what `prepare_worker.measure` returned in each repetition."""
    medians = {name: statistics.median(each[name] for each in repetitions) for name in repetitions[0]}
    total, train = medians["text (bytes)"], medians["training part (bytes)"]
    sizes = {"encoding": total, "second start": None}
    if config.kind in ("bpe", "char"):  # the others read no text
        sizes = {"training the tokenizer": min(train, config.train_bytes) if config.kind == "bpe" else train} | sizes
    rows = []
    for stage, size in sizes.items():
        seconds, peak = medians[f"{stage} (s)"], medians.get(f"{stage}: peak memory (bytes)")
        rows.append(
            {
                "text (MB)": total / 1e6,
                "stage": stage,
                "seconds": seconds,
                "MB/s": size and size / 1e6 / seconds,
                "peak memory (MB)": peak and peak / 1e6,
                "memory before the start (MB)": peak and medians["before: memory (bytes)"] / 1e6,
            }
        )
    return rows


def write_text(path: Path, size: int) -> Path:
    """Writes the sources of the standard library, repeated until the file has `size` bytes."""
    left = size
    with path.open("wb") as file:
        while left > 0:
            for piece in StandardLibrary().pieces("train"):
                left -= file.write(piece.text.encode()[:left])
    return path


def measure(text: Path, config: TokenizerConfig) -> dict[str, float]:
    """`prepare_worker.measure` in a separate process.

    Raises:
        UserError: the process fails.
    """
    _, output = run_process("preparing the text", [*WORKER, str(text), json.dumps(asdict(config))])
    return json.loads(last_line(output))
