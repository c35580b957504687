"""Throughput counts training alone, and progress tells what was measured."""

import time

from model.training.callbacks import Metrics, Stopwatch


def test_stopwatch_counts_only_while_it_runs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()
    watch.start()
    now[0] = 2.0
    watch.stop()
    now[0] = 50.0  # a validation
    watch.stop()
    watch.start()
    watch.start()
    now[0] = 53.0
    assert watch.lap() == 5.0
    now[0] = 54.5
    assert watch.lap() == 1.5


def test_mfu_is_the_median_speed_against_the_peak():
    metrics = Metrics(tokens_per_step=100, flops_per_token=6e6, peak_flops=3e12)
    metrics.train = [{"step": step, "loss": 1.0, "tokens_per_second": speed} for step, speed in ((1, 1e3), (2, 2e5), (3, 3e5))]
    assert metrics.tokens_per_second() == 2e5
    assert metrics.mfu() == 2e5 * 6e6 / 3e12
    assert Metrics(100, 6e6, None).mfu(2e5) is None
    metrics.count_devices(4)
    assert metrics.tokens_per_step == 400 and metrics.mfu(8e5) == 2e5 * 6e6 / 3e12


def test_curves_survive_a_checkpoint():
    metrics, resumed = Metrics(1, 1.0, None), Metrics(1, 1.0, None)
    metrics.train.append({"step": 10, "loss": 2.0, "tokens_per_second": 5.0})
    metrics.val.append({"step": 10, "loss": 2.5, "bpb": 1.0})
    resumed.load_state_dict(metrics.state_dict())
    assert resumed.train == metrics.train and resumed.val == metrics.val
