"""The process that what=data measures: prepares one text and prints its figures as JSON. Imports no torch."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tril.data import prepare as prepare_module
from tril.data.mixture import Member
from tril.data.sources.files import Files
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.benchmarks.machine import peak_memory, reset_peak_memory


def measure(text: Path, config: TokenizerConfig, cache_dir: str) -> dict[str, float]:
    """Seconds and peak memory of `tril.data.prepare.prepare`, separately for its tokenizer, and of a second call."""
    figures: dict[str, Any] = {"before: memory (bytes)": peak_memory()}

    def stage(name: str, task: Callable, *arguments):
        reset_peak_memory()
        started = time.perf_counter()
        result = task(*arguments)
        figures[f"{name} (s)"] = time.perf_counter() - started
        figures[f"{name}: peak memory (bytes)"] = peak_memory()
        reset_peak_memory()  # encoding starts when the tokenizer is trained
        return result

    member = Member(Files(str(text)), {"train": None, "val": None})
    prepare = partial(prepare_module.prepare, {"": member}, config, cache_dir, progress=False)
    with patch.object(prepare_module, "build", partial(stage, "training the tokenizer", prepare_module.build)):
        counts = stage("encoding", prepare).meta["counts"]
    figures["encoding (s)"] -= figures["training the tokenizer (s)"]
    stage("second start", prepare)
    figures["text (bytes)"] = counts["train"]["bytes"] + counts["val"]["bytes"]
    figures["training part (bytes)"] = counts["train"]["bytes"]
    return {name: value for name, value in figures.items() if value is not None}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(sys.argv[1]), TokenizerConfig(**json.loads(sys.argv[2])), folder)))
