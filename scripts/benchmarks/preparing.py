"""what=data: how fast text becomes tokens, and how much memory that takes. Each repetition is a separate process."""

import json
import statistics
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.benchmarks import processes
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import interleaved

SIZES = (30_000_000, 100_000_000)  # bytes of text; two, to see whether memory grows with the text
WORKER = (sys.executable, "-m", "tril.scripts.benchmarks.prepare_worker")


def run(bench: Bench) -> list[Section]:
    config = bench.run_config.data.tokenizer
    tasks = {size: partial(measure, write_text(bench.folder / f"text-{size}.txt", size), config) for size in SIZES}
    rows, samples = [], {}
    for size, repetitions in interleaved(tasks, bench.config.repeats, "data").items():
        figures = {name: [repetition[name] for repetition in repetitions] for name in repetitions[0]}
        rows += stages({name: statistics.median(values) for name, values in figures.items()}, config)
        samples |= {f"{name}, {size / 1e6:g} MB": values for name, values in figures.items()}
    notes = [
        f"The text: the sources of Python's standard library, repeated up to that size; tokenizer: {config.kind}.",
        f"The median of {bench.config.repeats} processes, each with an empty cache folder, without imports.",
        "MB/s: of the text that the stage reads. Memory: the largest resident size in the stage, and the size before "
        "the first stage, with Python and the libraries loaded (Linux only).",
        "Second start: the same call when the tokens are cached, including the check that the text is unchanged.",
    ]
    return [Section("data", "Preparing text", rows, samples, notes)]


def stages(figures: dict[str, float], config: TokenizerConfig) -> list[dict[str, object]]:
    """The rows of one size of text, from the medians of what `prepare_worker.measure` returned."""
    total, train = figures["text (bytes)"], figures["training part (bytes)"]
    sizes = {"encoding": total, "second start": None}
    if config.kind in ("bpe", "char"):  # the others read no text
        sizes = {"training the tokenizer": min(train, config.train_bytes) if config.kind == "bpe" else train} | sizes
    memory = "before: memory (bytes)" in figures
    return [
        {
            "text (MB)": total / 1e6,
            "stage": stage,
            "seconds": figures[f"{stage} (s)"],
            "MB/s": size and size / 1e6 / figures[f"{stage} (s)"],
            "peak memory (MB)": figures[f"{stage}: peak memory (bytes)"] / 1e6 if memory else None,
            "memory before the start (MB)": figures["before: memory (bytes)"] / 1e6 if memory else None,
        }
        for stage, size in sizes.items()
    ]


def write_text(path: Path, size: int) -> Path:
    """Writes the sources of the standard library, repeated until the file has `size` bytes."""
    with path.open("wb") as file:
        while file.tell() < size:
            file.writelines(piece.text.encode() for piece in StandardLibrary().pieces("train"))
        file.truncate(size)
    return path


def measure(text: Path, config: TokenizerConfig) -> dict[str, float]:
    """`prepare_worker.measure` in a separate process.

    Raises:
        UserError: the process fails.
    """
    _, output = processes.run("preparing the text", [*WORKER, str(text), json.dumps(asdict(config))])
    return json.loads(processes.last_line(output))
