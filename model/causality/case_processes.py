"""The certificate of a small model in several processes, one core each.

The passes of a small model are too short to be divided over threads, but the cases of its grid are independent.
"""

import contextlib
import itertools
import multiprocessing
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch

from tril.model.causality.case import Case
from tril.model.causality.certificate import Certificate, certify, certify_canary, certify_case

MAX_PROCESSES = 8  # of 1 GB each for the default model
MIN_COST, MAX_COST = 3e8, 2e10  # FLOPs of a pass of one text; below, processes start too slowly; above, threads suffice
CANARY = -1  # its number among the numbers of cases
POLL_SECONDS = 1.0

Grid = Callable[[], Sequence[Callable[[], Case]]]  # returns functions that build the cases; can be pickled


@dataclass(frozen=True)
class Shared:
    """What the processes share.

    Attributes:
        order: numbers of cases in the order in which they are started.
        started: how many of them a process has taken.
        done: (number, certificate or exception) of the other processes.
    """

    order: Sequence[int]
    started: Any  # multiprocessing.Value
    done: Any  # multiprocessing.Queue

    def take(self) -> int | None:
        """The number of a case that no other process runs; None: there is none."""
        with self.started.get_lock():
            self.started.value += 1
            place = self.started.value - 1
        return self.order[place] if place < len(self.order) else None


def certify_grid(subject: str, grid: Grid, *, progress: Callable[[str], None] = lambda name: None) -> Certificate:
    """The same as `certify`, for a small model on a CPU in one process per thread of torch.

    Args:
        subject: a name for the model.
        grid: called in each process.
        progress: called with the name of each case.

    Raises:
        ModelError: the model under test fails.
    """
    builders = grid()
    first = builders[0]()
    small = first.subject.device.type == "cpu" and MIN_COST <= first.subject.cost(max(first.lengths)) <= MAX_COST
    if small and (processes := min(torch.get_num_threads(), MAX_PROCESSES)) > 1:
        return certify_in_processes(subject, grid, processes, progress=progress)
    return certify(subject, itertools.chain([first], (build() for build in builders[1:])), progress=progress)


def certify_in_processes(
    subject: str, grid: Grid, processes: int, *, progress: Callable[[str], None] = lambda name: None
) -> Certificate:
    """The same with a given number of processes: this one, and those that it starts.

    The results are in the order of the grid. The cases of a process that is killed run in this one.
    """
    certificate, builders = Certificate(subject), grid()
    context = multiprocessing.get_context("spawn")  # a fork would copy the locks of torch's threads
    # This process takes the first case at once, which takes longest. Flex, at the end of the grid, comes next.
    shared = Shared([CANARY, *range(len(builders) - 1, 0, -1)], context.Value("i", 0), context.Queue())
    numbers = [0, CANARY, *range(1, len(builders))]
    parts: dict[int, Certificate] = {}

    def add(number: int, part: Certificate) -> None:
        parts[number] = part
        if number != CANARY:
            progress(part.subject)

    with certificate.timed(), started(context, grid, shared, processes - 1) as others, one_thread():
        first = builders[0]()
        add(0, certify_case(first))
        certificate.dependencies, certificate.allowed = first.dependencies, first.subject.visible(first.lengths[-1])
        while (number := shared.take()) is not None:
            add(number, run(builders, number))
        for number, part in finished(shared, others, missing=len(numbers) - len(parts)):
            add(number, part)
        for number in numbers:
            if number not in parts:  # its process was killed
                add(number, run(builders, number))
    for number in numbers:
        certificate.add(parts[number])
    return certificate


def run(builders: Sequence[Callable[[], Case]], number: int) -> Certificate:
    """The checks of one case, or the canary test of the first."""
    return certify_canary(builders[0]()) if number == CANARY else certify_case(builders[number]())


@contextlib.contextmanager
def started(context: Any, grid: Grid, shared: Shared, n: int) -> Iterator[list]:
    """Processes that run cases until the end of the block."""
    others = [context.Process(target=work, args=(grid, shared), daemon=True) for _ in range(n)]
    for process in others:
        process.start()
    try:
        yield others
    finally:
        for process in others:
            process.kill()


def work(grid: Grid, shared: Shared) -> None:
    """Runs cases in a started process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # intended on a CPU
    torch.set_num_threads(1)
    builders = grid()
    while (number := shared.take()) is not None:
        try:
            shared.done.put((number, run(builders, number)))
        except Exception as error:  # of the model under test
            shared.done.put((number, error))


def finished(shared: Shared, others: list, missing: int) -> Iterator[tuple[int, Certificate]]:
    """The certificates from other processes, until all are there or the processes have ended."""
    while missing:
        alive = any(process.is_alive() for process in others)
        try:
            number, result = shared.done.get(timeout=POLL_SECONDS)
        except queue.Empty:
            if not alive:
                return
            continue
        if isinstance(result, Exception):
            raise result
        missing -= 1
        yield number, result


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
