"""Clocks, the order of repetitions, and ratios of pairs."""

import itertools

import pytest
import torch

from tril.scripts.benchmarks import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_repetitions_alternate_and_reverse_their_order(capsys):
    order = []
    counter = itertools.count()

    def task(name):
        return lambda: order.append(name) or next(counter)

    results = timing.interleaved({name: task(name) for name in "ABC"}, 3, "speed")
    assert "".join(order) == "ABCCBAABC"
    assert results == {"A": [0, 5, 6], "B": [1, 4, 7], "C": [2, 3, 8]}
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"speed: repetition {i} of 3" for i in (1, 2, 3)] and printed.out == ""


def test_ratios_are_taken_pair_by_pair():
    # not only 20 / 10, the ratio of the medians: 1 / 1 and 300 / 100 count as well
    assert timing.paired_ratio([1, 20, 300], [1, 10, 100]) == {"median": 2, "smallest": 1, "largest": 3}
    assert timing.paired_ratio([1, 1, 8], [2, 4, 2]) == {"median": 0.5, "smallest": 0.25, "largest": 4}
    with pytest.raises(ValueError):
        timing.paired_ratio([1], [1, 2])


def test_each_step_after_the_warm_up_is_timed(clock):
    lengths = iter([100.0, 50, 1, 2, 4])

    def step():
        clock.now += next(lengths)

    assert timing.step_seconds(step, "cpu", warmup=2, steps=3) == [1, 2, 4]
    assert next(lengths, None) is None


def test_seconds_of_one_call(clock):
    def task():
        clock.now += 3

    clock.now = 10.0
    assert timing.step_seconds(task, "cpu") == [3]


def test_on_cuda_the_marks_are_events_and_nothing_waits_before_the_end(monkeypatch):
    """Events of a fake device record what is called."""
    calls = []

    class Event:
        count = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            calls.append("record")
            self.at, Event.count = 2.0**Event.count, Event.count + 1  # milliseconds

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "synchronize", lambda device: calls.append("wait"))
    timer = timing.StepTimer("cuda")
    for _ in range(4):
        timer.mark()
    assert calls == ["record"] * 4
    assert timer.seconds() == pytest.approx([0.001, 0.002, 0.004])
    assert calls == ["record"] * 4 + ["wait"]
