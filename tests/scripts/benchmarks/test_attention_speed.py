"""what=attention: what is computed, counted and left out."""

import pytest
import torch

from tests.conftest import assert_close
from tril.scripts.benchmarks import attention_speed


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    monkeypatch.setitem(attention_speed.LONGEST, "cpu", 256)


@pytest.fixture
def literal(monkeypatch):
    """Replaces clock and memory counter: seconds and bytes by (backend, length)."""
    times, memory = {}, {}
    monkeypatch.setattr(attention_speed, "call", lambda name, length, *rest: lambda: (name, length))
    monkeypatch.setattr(attention_speed, "step_seconds", lambda step, device: [1.0])
    monkeypatch.setattr(attention_speed, "seconds_per_call", lambda step, calls, device: times.get(step(), 0.001))
    monkeypatch.setattr(attention_speed, "peak_memory", lambda step, device: memory.get(step(), 1000))
    return times, memory


def test_rows_from_literal_times(make_bench, literal):
    times, memory = literal
    times["explicit", 128], memory["stacked", 64] = 0.25, 3_000_000
    timed, counted = attention_speed.run(make_bench("repeats=2"))
    assert [row["length"] for row in timed.rows] == [64, 128, 256]
    # flex has no backward on a CPU
    assert timed.rows[1] == {"length": 128, "stacked (ms)": 1, "explicit (ms)": 250, "fused (ms)": 1}
    assert counted.rows[0] == {"length": 64, "stacked (MB)": 3, "explicit (MB)": 0.001, "fused (MB)": 0.001}
    assert timed.samples["explicit, length 128 (s)"] == [0.25, 0.25] and len(timed.samples) == 9
    assert not any("Left out" in note for note in timed.notes)


def test_a_length_that_exceeds_the_memory_is_left_out_with_all_longer_ones(make_bench, literal, monkeypatch):
    monkeypatch.setattr(attention_speed, "total_memory", lambda: 4 * 8000)
    # 8004 and 8000 at 128, if memory grows quadratically
    literal[1]["explicit", 64], literal[1]["fused", 64] = 2001, 2000
    timed, counted = attention_speed.run(make_bench("repeats=2"))
    for section, unit in ((timed, "ms"), (counted, "MB")):
        assert [row[f"explicit ({unit})"] is None for row in section.rows] == [False, True, True]
        assert [row[f"fused ({unit})"] is None for row in section.rows] == [False, False, False]
    assert any(note.endswith("25% of the memory: explicit from 128.") for note in timed.notes)


def test_seconds_per_call_divides_by_the_number_of_calls(monkeypatch):
    devices = []
    monkeypatch.setattr(
        attention_speed, "step_seconds", lambda task, device: (task(), devices.append(device), [6.0])[-1]
    )
    count = []
    assert attention_speed.seconds_per_call(lambda: count.append(1), 3, "cpu") == 2.0
    assert len(count) == 3 and devices == ["cpu"]


@pytest.mark.parametrize("seconds, steps, calls", [(0.01, 50, 5), (0.01, 2, 2), (0.2, 50, 1)])
def test_a_repetition_of_short_calls_has_several(make_bench, literal, monkeypatch, seconds, steps, calls):
    counts = set()
    monkeypatch.setattr(attention_speed, "step_seconds", lambda step, device: [seconds])
    monkeypatch.setattr(attention_speed, "seconds_per_call", lambda step, n, device: counts.add(n) or 1.0)
    list(attention_speed.run(make_bench(f"steps={steps}")))
    assert counts == {calls}


def test_peak_memory_is_the_largest_sum_held_at_once():
    def step():
        first = torch.ones(1000)  # 4,000 bytes
        second = first.neg()  # 8,000 together
        del first
        third = second[:500].neg()  # 6,000
        return third.sum()

    kept = torch.ones(10_000)  # from before: not counted
    assert attention_speed.peak_memory(step, "cpu") == 8000 and len(kept) == 10_000


def test_peak_memory_of_the_explicit_backend_includes_the_scores():
    """The scores are quadratic: twice the length takes nearly 4 times as much, with the fused kernel only twice."""
    cases = [(name, n) for name in ("explicit", "fused") for n in (256, 512)]
    calls = {case: attention_speed.call(*case, torch.float32, "cpu") for case in cases}
    sizes = {case: attention_speed.peak_memory(call, "cpu") for case, call in calls.items()}
    assert sizes["explicit", 512] > 2 * 4 * 4 * 512 * 512  # scores and weights of four heads in float32
    assert sizes["explicit", 512] > 3.5 * sizes["explicit", 256]
    assert sizes["fused", 512] < 2.5 * sizes["fused", 256]


def test_all_backends_compute_the_same_causal_attention():
    gradients = {}
    for name in ("stacked", "explicit", "fused"):
        torch.manual_seed(1)
        gradients[name] = attention_speed.call(name, 64, torch.float32, "cpu")()
    for name in ("stacked", "explicit"):
        for actual, expected in zip(gradients[name], gradients["fused"], strict=True):
            assert actual.shape == (1, 4, 64, 64)
            assert_close(actual, expected)
    # the first query attends to one key, with weight 1, so its gradient is zero
    assert gradients["fused"][0][:, :, 0].abs().max() < 1e-5


def test_the_guides_have_slopes_1_and_2():
    times = {"a": {64: 1.0, 128: 8.0}, "b": {64: 2.0, 128: 5.0}, "c": {64: 3.0}}
    plot = attention_speed.section("title", "ms", times, {}, []).plot
    assert plot.lines == times and plot.log
    assert plot.guides == {"O(T)": {64: 2.5, 128: 5}, "O(T²)": {64: 2, 128: 8}}
