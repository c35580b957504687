"""Learning-rate schedules against literal values and nanoGPT's formula."""

import math

import pytest

from tril.model.training.schedule import ScheduleConfig, lr_factor, steps_for_flops


def factors(total: int, **config) -> list[float]:
    return [lr_factor(step, total, ScheduleConfig(**config)) for step in range(total + 3)]


def test_wsd_decay_never_starts_inside_the_warmup():
    shape = {"warmup_steps": 3, "min_lr_ratio": 0.1}
    assert factors(9, kind="wsd", decay_fraction=1.0, **shape) == factors(9, kind="linear", **shape)


def test_wsd_decay_may_round_to_no_step():
    assert factors(4, kind="wsd", warmup_steps=0, decay_fraction=0.01) == [1, 1, 1, 1, 0, 0, 0]


def test_cosine_is_the_schedule_of_nanogpt():
    learning_rate, min_lr, warmup_iters, lr_decay_iters = 1e-3, 1e-4, 100, 2000

    def reference(it: int) -> float:
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

    config = ScheduleConfig(kind="cosine", warmup_steps=warmup_iters, min_lr_ratio=min_lr / learning_rate)
    for it in (0, 1, 99, 100, 101, 1050, 1999, 2000, 2001):
        assert learning_rate * lr_factor(it, lr_decay_iters, config) == pytest.approx(reference(it), rel=1e-12)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd", "constant"])
def test_rises_to_one_then_never_rises_again(kind):
    got = factors(50, kind=kind, warmup_steps=10, min_lr_ratio=0.05)
    assert got[10] == 1 == max(got)
    assert all(a < b for a, b in zip(got[:10], got[1:11], strict=True))
    assert all(a >= b for a, b in zip(got[10:], got[11:], strict=False))
    assert min(got[:50]) > 0  # no step of the run is wasted


def test_a_warmup_longer_than_the_run_is_a_tenth_of_it():
    assert factors(3, warmup_steps=3)[:3] == [0.25, 0.5, 0.75]
    assert factors(20, warmup_steps=21) == factors(20, warmup_steps=2)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0, 7.7])
def test_the_steps_for_some_flops_cost_as_much_and_have_as_many_validations(scale):
    steps, interval = steps_for_flops(900 * scale, 1.0, max_steps=900, val_check_interval=150)
    assert steps == pytest.approx(900 * scale, rel=0.02) and -(-steps // interval) == 6
    with pytest.raises(ValueError, match=r"leave 1\.5 steps .* use at least 25"):
        steps_for_flops(1.5, 1.0, max_steps=900, val_check_interval=150)
