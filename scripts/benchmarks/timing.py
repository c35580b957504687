"""Clocks, alternating repetitions, and their median and range."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch


def synchronize(device: str) -> None:
    """Waits until all work queued on the device is done."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


class StepTimer:
    """Measures the time between marks. On CUDA these are events in the stream: nothing waits before `seconds`."""

    def __init__(self, device: str):
        self.device = device
        self._marks: list = []

    def mark(self) -> None:
        if self.device == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            synchronize(self.device)
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The time between each mark and the next: one value fewer than there are marks."""
        synchronize(self.device)
        if self.device == "cuda":
            return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._marks)]
        return [end - start for start, end in pairwise(self._marks)]


def step_seconds(step: Callable[[], object], device: str, *, warmup: int = 0, steps: int = 1) -> list[float]:
    """The time of each of `steps` calls, after `warmup` calls that are not timed."""
    for _ in range(warmup):
        step()
    synchronize(device)
    timer = StepTimer(device)
    timer.mark()
    for _ in range(steps):
        step()
        timer.mark()
    return timer.seconds()


def steps_within(seconds: float, step: float, most: int) -> int:
    """How many steps of `step` seconds take about `seconds` together: 1 to `most`."""
    return max(1, min(most, round(seconds / step)))


def interleaved(tasks: Mapping[Any, Callable[[], Any]], repeats: int, progress: str) -> dict[Any, list]:
    """Runs each task `repeats` times in alternating order (A B, B A, A B), so that a drift of the machine favors none.

    Args:
        progress: the name under which stderr reports each repetition.

    Returns:
        The results of each task.
    """
    results = {name: [] for name in tasks}
    for repetition in range(repeats):
        for name in list(tasks)[:: -1 if repetition % 2 else 1]:
            results[name].append(tasks[name]())
        print(f"{progress}: repetition {repetition + 1} of {repeats}", file=sys.stderr, flush=True)
    return results


def spread(values: Sequence[float], column: str = "{}") -> dict[str, float]:
    """The median, the smallest and the largest value, as columns of a table; `column` is the format of their names."""
    spread = {"median": statistics.median(values), "smallest": min(values), "largest": max(values)}
    return {column.format(name): value for name, value in spread.items()}


def paired_ratio(a: Sequence[float], b: Sequence[float], column: str = "{}") -> dict[str, float]:
    """The `spread` of a_i / b_i."""
    return spread([x / y for x, y in zip(a, b, strict=True)], column)
