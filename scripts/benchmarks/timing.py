"""Clocks: repetitions in turn, medians, the time of single steps, peak memory."""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")
CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux, man 5 proc: writing 5 resets the peak of the resident size


def synchronise(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def seconds(task: Callable[[], object], device: str) -> float:
    """Of one call."""
    synchronise(device)
    started = time.perf_counter()
    task()
    synchronise(device)
    return time.perf_counter() - started


class Laps:
    """The time between marks. On CUDA the marks are events on the stream, so that nothing waits until the times are asked for."""

    def __init__(self, device: str):
        self.device = device
        self._marks: list = []

    def mark(self) -> None:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            synchronise(self.device)
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """One less than there are marks."""
        synchronise(self.device)
        pairs = zip(self._marks, self._marks[1:])
        if self.device == "cuda":
            return [before.elapsed_time(after) / 1000 for before, after in pairs]
        return [after - before for before, after in pairs]


def step_seconds(step: Callable[[], object], *, warmup: int, steps: int, device: str) -> list[float]:
    """Of each of `steps` calls, after `warmup` that are not timed."""
    for _ in range(warmup):
        step()
    synchronise(device)
    laps = Laps(device)
    laps.mark()
    for _ in range(steps):
        step()
        laps.mark()
    return laps.seconds()


def interleaved(tasks: dict[str, Callable[[], T]], repeats: int, progress: str = "") -> dict[str, list[T]]:
    """What each task returned, `repeats` times: A B, B A, A B, so that a machine that warms up or slows down favours none.

    progress: says on stderr, under this name, when a repetition is done.
    """
    results: dict[str, list[T]] = {name: [] for name in tasks}
    for repetition in range(repeats):
        for name in list(tasks)[:: -1 if repetition % 2 else 1]:
            results[name].append(tasks[name]())
        if progress:
            print(f"{progress}: repetition {repetition + 1} of {repeats}", file=sys.stderr, flush=True)
    return results


def summary(values: Sequence[float]) -> dict[str, float]:
    """median, p10, p90, min and max; percentiles between two values are interpolated."""
    shares = {"median": 0.5, "p10": 0.1, "p90": 0.9, "min": 0, "max": 1}
    return dict(zip(shares, np.quantile(values, list(shares.values())).tolist()))


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Median, smallest and largest of a_i / b_i."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def reset_peak_memory(device: str) -> None:
    """`peak_memory_bytes` counts from here; where the system cannot (a CPU outside of Linux), from the start of the process."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            CLEAR_REFS.write_text("5")
