"""The benchmark's clocks: whose turn it is, what a median is, what peaks are counted."""

import itertools

import pytest
import torch

from tril.model.training.summary import peak_memory_bytes
from tril.scripts.benchmarks import timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still but for what the test adds to it."""

    class Clock:
        now = 0.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_repetitions_take_turns_and_the_order_changes_each_time(capsys):
    order = []
    counter = itertools.count()

    def task(name):
        return lambda: order.append(name) or next(counter)

    results = timing.interleaved({name: task(name) for name in "ABC"}, 3, "speed")
    assert "".join(order) == "ABCCBAABC"
    assert results == {"A": [0, 5, 6], "B": [1, 4, 7], "C": [2, 3, 8]}
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"speed: repetition {i} of 3" for i in (1, 2, 3)] and said.out == ""
    timing.interleaved({"A": lambda: 0}, 1)
    assert capsys.readouterr().err == ""


def test_summary_of_literal_values():
    assert timing.summary([5.0, 1, 2, 4, 3]) == pytest.approx({"median": 3, "p10": 1.4, "p90": 4.6, "min": 1, "max": 5})
    assert timing.summary([1.0, 2]) == pytest.approx({"median": 1.5, "p10": 1.1, "p90": 1.9, "min": 1, "max": 2})
    assert timing.summary([7.0]) == {"median": 7, "p10": 7, "p90": 7, "min": 7, "max": 7}


def test_ratios_are_taken_pair_by_pair():
    assert timing.paired_ratio([1, 20, 300], [1, 10, 100]) == (
        2,
        1,
        3,
    )  # and not 20 / 10 of the medians alone: 1 / 1 and 300 / 100 count
    assert timing.paired_ratio([1, 1, 8], [2, 4, 2]) == (0.5, 0.25, 4)
    with pytest.raises(ValueError):
        timing.paired_ratio([1], [1, 2])


def test_steps_are_timed_one_by_one_after_the_warm_up(clock):
    lengths = iter([100.0, 50, 1, 2, 4])

    def step():
        clock.now += next(lengths)

    assert timing.step_seconds(step, warmup=2, steps=3, device="cpu") == [1, 2, 4]
    assert next(lengths, None) is None


def test_seconds_of_one_call(clock):
    def task():
        clock.now += 3

    clock.now = 10.0
    assert timing.seconds(task, "cpu") == 3


@pytest.mark.skipif(not timing.CLEAR_REFS.exists(), reason="the peak cannot be reset here")
def test_peak_memory_counts_from_its_reset():
    size = 1 << 28  # bytes
    timing.reset_peak_memory("cpu")
    before = peak_memory_bytes("cpu")
    large = torch.ones(size // 4)
    assert size * 0.9 < peak_memory_bytes("cpu") - before < size * 1.5
    del large
    assert peak_memory_bytes("cpu") - before > size * 0.9
    timing.reset_peak_memory("cpu")
    assert peak_memory_bytes("cpu") - before < size / 2


def test_on_cuda_the_marks_are_events_and_nothing_waits_before_the_end(monkeypatch):
    """What a CPU can tell of it: events of a made-up device that notes what is asked of it."""
    asked = []

    class Event:
        count = 0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            asked.append("record")
            self.at, Event.count = 2.0**Event.count, Event.count + 1  # milliseconds

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "synchronise", lambda device: asked.append("wait"))
    laps = timing.Laps("cuda")
    for _ in range(4):
        laps.mark()
    assert asked == ["record"] * 4
    assert laps.seconds() == pytest.approx([0.001, 0.002, 0.004])
    assert asked == ["record"] * 4 + ["wait"]
