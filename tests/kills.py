"""Runs of train.py that are killed at chosen moments and resumed, and what is left of them.

A child process, forked from the tests, trains; SIGKILL ends it within a chosen call of a function. What it was doing
may be half done: a file that is being written may have any length.
"""

import csv
import json
import os
import pkgutil
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import tril.data.datamodule
import tril.model.training.callbacks
import tril.model.training.loss_plot
import tril.model.training.module  # noqa: F401 these four are imported once, not in each forked run
from tests.runs import TINY, composed
from tril import train

POINTS = (  # functions within which a run is killed
    "tril.data.tokenizer.build",
    "tril.data.prepare._write_part",
    "tril.data.prepare._measured_split",
    "tril.model.training.callbacks.causality_check.CausalityCheck.on_fit_start",
    "tril.model.training.module.TrainingModule.training_step",
    "tril.model.training.module.TrainingModule.validation_step",
    "tril.model.training.module.TrainingModule.on_validation_epoch_end",
    "tril.model.training.optim.MuonAdamW.step",
    "tril.model.training.callbacks.metrics.Metrics.on_train_batch_end",
    "tril.model.training.callbacks.metrics.Metrics.on_validation_end",
    "tril.model.training.callbacks.samples.Samples.on_validation_end",
    "tril.model.training.callbacks.window_losses.WindowLosses.on_validation_end",
    "tril.model.training.loggers.RowWriter.save",
    "tril.model.training.checkpointing.write_and_rotate",
    "tril.model.training.checkpointing.link",
    "os.replace",
    "torch.save",
    "tril.model.training.summary.write_json",
)
TIMES = (
    "seconds",
    "tokens_per_second",
    "mfu",
    "peak_memory_gb",
    "wall_seconds",
    "created",
    "meta.json",
)  # of the clock


def run(overrides: list[str], folder: Path, before: Callable[[], object] = lambda: None) -> int:
    """One start of train.py in a forked process, which continues the run if it has a checkpoint.

    Args:
        before: called in the child.

    Returns:
        The exit status; negative: the signal that ended it.
    """
    resumed = (folder / "checkpoints" / "last.ckpt").is_file()
    cache = [override for override in overrides if override.startswith("data.cache_dir=")]  # has to be typed again
    arguments = [f"resume={folder}", *cache] if resumed else overrides
    if (child := os.fork()) == 0:
        status = 1
        try:
            sys.stdout = sys.stderr = (folder.parent / f"{folder.name}.log").open("a", buffering=1)
            before()
            train.train(composed(*arguments, f"output_dir={folder}"))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def replaced(point: str, around: Callable[..., object]) -> mock._patch:
    """A patch that calls around(original, *arguments) for the function with the dotted name `point`."""
    function = pkgutil.resolve_name(point)
    return mock.patch(point, lambda *args, **options: around(function, *args, **options))


def count_calls(counts_file: Path) -> Callable[[], None]:
    """For `before`: writes how often the run calls each point."""

    def start() -> None:
        counts: Counter[str] = Counter()
        for point in POINTS:

            def counted(function, *args, point=point, **options):
                counts[point] += 1
                counts_file.write_text(json.dumps(counts))
                return function(*args, **options)

            replaced(point, counted).start()

    return start


def kill_within(point: str, call: int, seed: int) -> Callable[[], None]:
    """For `before`: SIGKILL in the given call of `point`, before it, after it, or after half of what it writes."""
    chance, calls = random.Random(seed), 0

    def killed(function, *args, **options):
        nonlocal calls
        calls += 1
        if calls != call:
            return function(*args, **options)
        if chance.random() < 0.5:
            sizes = sizes_of(Path.cwd())
            function(*args, **options)
            tear(sizes, chance) if chance.random() < 0.5 else None
        os.kill(os.getpid(), signal.SIGKILL)

    return lambda: replaced(point, killed).start()


def kill_after(seconds: float) -> Callable[[], None]:
    """For `before`: SIGKILL from another process after this time."""

    def start() -> None:
        child = os.getpid()
        if os.fork() == 0:
            time.sleep(seconds)
            if os.getppid() == child:
                os.kill(child, signal.SIGKILL)
            os._exit(0)

    return start


def sizes_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def tear(before: dict[Path, int], chance: random.Random) -> None:
    """Takes a random part of what was appended to a file, or written to a new temporary one, as a kill in `write`."""
    for path in before:
        if path.is_file() and (grown := path.stat().st_size - before[path]) > 0 and path.suffix in (".csv", ".txt"):
            os.truncate(path, before[path] + chance.randrange(grown))


def outcome(folder: Path) -> dict[str, object]:
    """All that a run leaves, without times: its checkpoints, metrics, samples, losses of windows and summary."""
    found: dict[str, object] = {}
    for name in ("last", "best"):
        content = torch.load(folder / "checkpoints" / f"{name}.ckpt", weights_only=True)
        content.pop("digests"), content.pop("hparams_name", None)
        content["loops"] = content["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        found[f"{name}.ckpt"] = without_times(content)
    [log] = folder.glob("csv/*/metrics.csv")
    with log.open(newline="") as file:
        rows = [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in csv.DictReader(file)]
    found["metrics.csv"] = rows
    found["samples.txt"] = (folder / "samples.txt").read_bytes()
    for name in ("last", "best"):
        with np.load(folder / f"windows_{name}.npz") as arrays:
            found[f"windows_{name}.npz"] = {key: arrays[key].tobytes() for key in arrays}
    summary = json.loads((folder / "summary.json").read_text())
    found["summary.json"] = {k: v for k, v in without_times(summary).items() if k not in ("folder", "sample_with")}
    found["files"] = {str(path.relative_to(folder)): "present" for path in folder.rglob("*") if path.is_file()}
    return found


def without_times(value):
    """Plain containers without what a clock or the folder's name gives; tensors as their bytes."""
    if isinstance(value, dict):
        return {str(key): without_times(item) for key, item in value.items() if str(key) not in TIMES}
    if isinstance(value, list | tuple):
        return [without_times(item) for item in value]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    return value


def differences(found, expected, where: str = "") -> list[str]:
    """The places at which two results of `outcome` differ."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted({*expected, *found})
        return [place for key in keys for place in differences(found.get(key), expected.get(key), f"{where}/{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [place for i, (x, y) in pairs for place in differences(x, y, f"{where}/{i}")]
    return [] if found == expected else [where]


def check(text: str, n: int, name: str, overrides: list[str]) -> list[str]:
    """Kills one run `n` times and compares it with one that was not killed; returns where they differ.

    Half of the kills are at random times, the others within random calls of the functions of POINTS.
    """
    overrides = [*TINY, f"data.path={text}", *overrides]
    chance, whole, killed, counts = (
        random.Random(name),
        Path("whole").resolve(),
        Path("killed").resolve(),
        Path("counts"),
    )
    started = time.monotonic()
    assert run([*overrides, "data.cache_dir=cache1"], whole, count_calls(counts)) == 0, log(whole)
    seconds = time.monotonic() - started
    points = list(json.loads(counts.read_text()).items())
    n_kills, attempt, status = 0, 0, 0
    while n_kills < n:
        if attempt % 2:
            end = kill_after(chance.uniform(0, seconds))
        else:
            point, calls = chance.choice(points)
            end = kill_within(point, chance.randint(1, calls), seed=attempt)
        status = run([*overrides, "data.cache_dir=cache2"], killed, end)
        assert status in (0, -signal.SIGKILL), log(killed)
        n_kills += status != 0
        attempt += 1
        if status == 0 and n_kills < n:  # it ended before the moment of the kill
            shutil.rmtree(killed)
    if status != 0:
        assert run([*overrides, "data.cache_dir=cache2"], killed) == 0, log(killed)
    return differences(outcome(killed), outcome(whole))


def log(folder: Path) -> str:
    return (folder.parent / f"{folder.name}.log").read_text()


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, text, n, name, *overrides = sys.argv[1:]
    os.chdir(folder)
    found = check(text, int(n), name, overrides)
    assert found == [], found
