"""Clocks, alternating repetitions, and ratios of paired values."""

import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def synchronize(device: str) -> None:
    """Waits until all work queued on the device is done."""
    if device != "cpu":
        torch.get_device_module(device).synchronize()


def seconds(task: Callable[[], object], device: str) -> float:
    """The time of one call."""
    synchronize(device)
    started = time.perf_counter()
    task()
    synchronize(device)
    return time.perf_counter() - started


class StepTimer:
    """Measures the time between marks. On CUDA these are events in the stream: nothing waits before `seconds`."""

    def __init__(self, device: str):
        self.device = device
        self._marks: list = []

    def mark(self) -> None:
        if self.device == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            synchronize(self.device)
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The time between each mark and the next: one value fewer than there are marks."""
        synchronize(self.device)
        if self.device == "cuda":
            return [start.elapsed_time(end) / 1000 for start, end in pairwise(self._marks)]
        return [end - start for start, end in pairwise(self._marks)]


def step_seconds(step: Callable[[], object], *, warmup: int, steps: int, device: str) -> list[float]:
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


def interleaved(tasks: dict[Key, Callable[[], Result]], repeats: int, progress: str = "") -> dict[Key, list[Result]]:
    """Runs each task `repeats` times in alternating order (A B, B A, A B), so that a drift of the machine favors none.

    Args:
        progress: the name under which stderr reports each repetition; empty: no report.

    Returns:
        The results of each task.
    """
    results: dict[Key, list[Result]] = {name: [] for name in tasks}
    for repetition in range(repeats):
        for name in list(tasks)[:: -1 if repetition % 2 else 1]:
            results[name].append(tasks[name]())
        if progress:
            print(f"{progress}: repetition {repetition + 1} of {repeats}", file=sys.stderr, flush=True)
    return results


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """The median, smallest and largest of a_i / b_i."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    return {"median": statistics.median(ratios), "smallest": min(ratios), "largest": max(ratios)}
