"""what=attention: what is computed, counted and left out."""

import math

import pytest
import torch
from matplotlib.figure import Figure

from tests.conftest import assert_close
from tests.scripts.benchmarks.test_bench import composed
from tril.scripts.bench import plan_of
from tril.scripts.benchmarks import attention_speed as attention
from tril.scripts.benchmarks.section import Bench
from tril.scripts.common.cli import plain


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setitem(attention.LONGEST, "cpu", 256)
    cfg = composed(
        "data.tokenizer.vocab_size=300",
        "trainer.accelerator=cpu",
        "trainer.precision=32-true",
        f"output_dir={tmp_path}",
    )
    return Bench(plan_of(cfg), plain(cfg), 2, 1, 1, [], tmp_path)


@pytest.fixture
def literal(monkeypatch):
    """No clock and no counting: times and bytes of every backend and length, as asked for."""
    times, memory = {}, {}
    monkeypatch.setattr(attention, "call", lambda name, length, *rest: lambda: (name, length))
    monkeypatch.setattr(attention, "seconds", lambda step, device: 1.0)
    monkeypatch.setattr(attention, "repetition", lambda step, calls, device: times.get(step(), 0.001))
    monkeypatch.setattr(attention, "peak", lambda step, device: memory.get(step(), 1000))
    return times, memory


def test_the_figures_from_literal_times(bench, literal):
    times, memory = literal
    times["explicit", 128], memory["stacked", 64] = 0.25, 3_000_000
    timed, counted = attention.run(bench)
    assert [row["length"] for row in timed.rows] == [64, 128, 256]
    assert timed.rows[1] == {
        "length": 128,
        "stacked (ms)": 1,
        "explicit (ms)": 250,
        "fused (ms)": 1,
    }  # flex has no backward on a CPU
    assert counted.rows[0] == {"length": 64, "stacked (MB)": 3, "explicit (MB)": 0.001, "fused (MB)": 0.001}
    assert timed.samples["explicit, length 128 (s)"] == [0.25, 0.25] and len(timed.samples) == 9
    assert not any("Left out" in note for note in timed.notes)


def test_what_would_not_fit_is_left_out_with_all_that_is_longer(bench, literal, monkeypatch):
    monkeypatch.setattr(attention, "memory_of", lambda device: 4 * 8000)
    literal[1]["explicit", 64] = 2001  # 8004 at 128, if memory grows with the square
    timed, counted = attention.run(bench)
    for section, unit in ((timed, "ms"), (counted, "MB")):
        assert [row[f"explicit ({unit})"] is None for row in section.rows] == [False, True, True]
        assert [row[f"fused ({unit})"] is None for row in section.rows] == [False, False, False]
    assert any(note.endswith("25% of the memory: explicit from 128 on.") for note in timed.notes)


def test_the_number_of_calls(monkeypatch):
    spans = []
    monkeypatch.setattr(attention, "seconds", lambda task, device: (task(), spans.append(device), 6.0)[-1])
    count = []
    assert attention.repetition(lambda: count.append(1), 3, "cpu") == 2.0 and len(count) == 3 and spans == ["cpu"]


@pytest.mark.parametrize("seconds, steps, calls", [(0.01, 50, 5), (0.01, 2, 2), (0.2, 50, 1)])
def test_short_calls_are_repeated_within_a_repetition(bench, literal, monkeypatch, seconds, steps, calls):
    asked = set()
    monkeypatch.setattr(attention, "seconds", lambda step, device: seconds)
    monkeypatch.setattr(attention, "repetition", lambda step, n, device: asked.add(n) or 1.0)
    attention.run(Bench(bench.plan, bench.cfg, 1, 1, steps, [], bench.folder))
    assert asked == {calls}


def test_peak_is_the_most_that_is_held_at_once():
    def step():
        first = torch.ones(1000)  # 4,000 bytes
        second = first.neg()  # 8,000 together
        del first
        third = second[:500].neg()  # 6,000
        return third.sum()

    kept = torch.ones(10_000)  # from before: not counted
    assert attention.peak(step, "cpu") == 8000 and len(kept) == 10_000


def test_peak_of_the_explicit_backend_holds_the_scores():
    """A quadratic part: with twice the length nearly four times as much, where the fused kernel in float32 takes twice as much."""
    asked = [(name, n) for name in ("explicit", "fused") for n in (256, 512)]
    sizes = {(name, n): attention.peak(attention.call(name, n, torch.float32, "cpu"), "cpu") for name, n in asked}
    assert sizes["explicit", 512] > 2 * 4 * 4 * 512 * 512  # scores and weights of four heads in float32
    assert sizes["explicit", 512] > 3.5 * sizes["explicit", 256]
    assert sizes["fused", 512] < 2.5 * sizes["fused", 256]


def test_every_backend_computes_the_same_causal_attention():
    gradients = {}
    for name in ("stacked", "explicit", "fused"):
        torch.manual_seed(1)
        gradients[name] = attention.call(name, 64, torch.float32, "cpu")()
    for name in ("stacked", "explicit"):
        for ours, theirs in zip(gradients[name], gradients["fused"]):
            assert ours.shape == (1, 4, 64, 64)
            assert_close(ours, theirs)
    assert (
        gradients["fused"][0][:, :, 0].abs().max() < 1e-5
    )  # the first query sees one key, so that its weight is 1 whatever it is


def test_expected():
    assert attention.expected({}, 64) == 0
    assert attention.expected({64: 10}, 128) == 40
    assert attention.expected({64: 10}, 256) == math.inf


def test_the_guides_have_slopes_1_and_2():
    axes = Figure().subplots()
    attention.draw(axes, "title", "ms", {"a": {64: 1.0, 128: 8.0}, "b": {64: 2.0, 128: 5.0}, "c": {64: 3.0}})
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {
        "a": [[64, 1], [128, 8]],
        "b": [[64, 2], [128, 5]],
        "c": [[64, 3]],
        "O(T)": [[64, 2.5], [128, 5]],
        "O(T²)": [[64, 2], [128, 8]],
    }
    assert axes.get_xscale() == axes.get_yscale() == "log"
