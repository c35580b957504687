"""minutes=: the size and the steps of a run that ends in time."""

import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.conftest import NANO_PARTS
from tests.contract.harness import BARE, metrics, run
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.runs import Run
from tril.model.training import time_budget
from tril.model.training.hardware import Hardware
from tril.model.training.settings import OptimConfig, ScheduleConfig, TrainerConfig
from tril.model.training.time_budget import AFTER, BEFORE, SHAPES, PlanSteps, fit_steps
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import RunConfig

PER_FLOP = 8e-12  # seconds
MODEL = GPTConfig(vocab_size=4096, context_length=256, **NANO_PARTS)
TIMED = [setting for setting in BARE if not setting.startswith(("trainer.max_steps", "trainer.val_check_interval"))]
CPU = Hardware("cpu", "32-true", False, "", None)
RUN = RunConfig.of(compose("train", ["data.batch_size=8"]).settings)
NANO = ("model.n_layers", "model.dim")


def seconds_of(plan: PlanSteps) -> float:
    return plan.steps * plan.step_seconds + -(-plan.steps // plan.interval) * plan.val_seconds


def plan(seconds, model=MODEL, kept=(), train_tokens=10**9, val_tokens=300_000, lengths=None, **groups) -> PlanSteps:
    """The planner of a run, with the model and the optimizer that it has planned."""
    counts = {"train": {"tokens": train_tokens}, "val": {"tokens": val_tokens}}
    data = SimpleNamespace(meta={"counts": counts}, lengths=lengths or {model.context_length: 1.0})
    config = replace(RUN, model=model, hardware=CPU, **groups)
    with mock.patch.object(time_budget, "seconds_per_flop", lambda *_: PER_FLOP):
        end = time.perf_counter() + seconds
        planned, planner = time_budget.plan_time(config, data, end=end, keeps=kept.__contains__)
    planner.model, planner.optim = planned.model, planned.optim
    return planner


def test_more_time_gives_more_tokens_and_larger_models_and_all_of_it_is_used():
    times = (60, 180, 600, 3600, 36_000, 360_000)
    plans = [plan(seconds) for seconds in times]
    shapes = [(each.model.n_layers, each.model.dim, each.model.n_heads) for each in plans]
    assert shapes == sorted(shapes) and {*shapes} == {*SHAPES}
    for seconds, each in zip(times, plans, strict=True):
        assert 0.8 * seconds - 4 < seconds_of(each) < seconds - BEFORE - AFTER


def test_the_seconds_of_steps_and_of_a_validation_are_those_of_their_flops():
    """A step of 8 windows of 256, of which the first half of the run cuts each into two."""
    chosen = plan(600, kept=NANO, lengths={128: 0.5, 256: 1.0})
    short, long = (8 * 256 * PER_FLOP * GPT(MODEL).flops_per_token({length: 1.0}) for length in (128, 256))
    assert chosen.model == MODEL and chosen.step_seconds == pytest.approx((short + long) / 2)
    assert chosen.val_seconds == pytest.approx(300_000 / 2048 * long / 3 + time_budget.BESIDES)


VALIDATIONS = [(10, (), 10), (1_000_000, (), 1), (300_000, (), 4), (300_000, ("trainer.val_check_interval",), 8)]


@pytest.mark.parametrize(("val_tokens", "kept", "validations"), VALIDATIONS)
def test_validations_of_the_whole_part_take_a_tenth_of_the_time_or_are_one(val_tokens, kept, validations):
    chosen = plan(600, kept=(*NANO, *kept), val_tokens=val_tokens, trainer=TrainerConfig(val_check_interval=250))
    assert -(-chosen.steps // chosen.interval) == validations
    assert 0.8 * 600 < seconds_of(chosen) < 600 - BEFORE - AFTER


def test_settings_that_are_kept_stay_and_the_rest_is_fitted_around_them():
    assert plan(600, kept=("model.n_layers",)).model.n_layers == MODEL.n_layers
    chosen = plan(60, replace(MODEL, dim=512), kept=("model.dim",), val_tokens=10_000)
    assert chosen.model.dim == 512 and chosen.model.n_layers < 4
    chosen = plan(60, replace(MODEL, n_heads=3), kept=("model.n_heads",))
    assert (chosen.model.dim, chosen.model.n_heads) == (192, 3)  # the smallest width that 3 divides


def test_a_small_text_is_not_read_too_often_and_the_weights_decay_by_its_passes():
    large, small, tiny = (plan(3600, train_tokens=n) for n in (10**9, 400_000, 34_000))
    assert [(x.optim.weight_decay, x.optim.muon_weight_decay) for x in (large, small, tiny)] == [
        (0, 0),
        (0.37, 0.37),
        (4, 4),
    ]
    assert small.steps == small.most == 4 * 400_000 // 2048 and tiny.steps == 200
    layers = [plan(360_000, train_tokens=n).model.n_layers for n in (10**9, 600_000, 34_000, 1_000)]
    assert layers == [8, 6, 4, 4]  # with at least 0.2 tokens per parameter of the blocks in four passes or 200 steps
    assert [plan(180, train_tokens=n).model.n_layers for n in (10**9, 34_000)] == [3, 4]  # all passes fit in the time
    assert plan(3600, kept=("optim.muon_weight_decay",), train_tokens=34_000).optim == RUN.optim
    assert plan(3600, optim=OptimConfig(kind="adamw"), train_tokens=34_000).optim.weight_decay == 0


@pytest.mark.parametrize(("seconds", "val_tokens"), [(4, 10), (600, 10**8)])
def test_a_time_that_is_too_short_is_an_error(seconds, val_tokens):
    with pytest.raises(ValueError, match=r"20 steps .* minutes leaves .*trainer\.limit_val_batches"):
        plan(seconds, val_tokens=val_tokens)


@pytest.mark.parametrize(("limit", "steps"), [(0.0, 2), (5.5, 5)])
def test_timed_steps_end_before_their_limit(monkeypatch, limit, steps):
    """Each takes a second; two are made in any case."""
    nll, now = GPT.nll, [0.0]
    monkeypatch.setattr(GPT, "nll", lambda *args: now.append(now[-1] + 1) or nll(*args))
    monkeypatch.setattr(time_budget.time, "perf_counter", lambda: now[-1])
    model = GPTConfig(vocab_size=11, context_length=512, n_layers=1, dim=8, n_heads=1)
    seconds = time_budget.seconds_per_flop(model, OptimConfig(), 10_000, CPU, limit)
    assert now[-1] == steps and seconds == pytest.approx(1 / (2048 * GPT(model).flops_per_token()))


def test_a_run_whose_time_is_over_is_the_one_of_its_recorded_steps(tmp_path, text, monkeypatch):
    """A fifth of its 40 steps is 8, and the rate decays over the last half, so at least 16 steps are left of them."""

    def planned(config, data, **_):
        config = replace(config, trainer=replace(config.trainer, max_steps=40, val_check_interval=15))
        return config, PlanSteps(config, step_seconds=1.0, val_seconds=0.1, end=time.perf_counter(), most=100)

    monkeypatch.setattr(time_budget, "plan_time", planned)
    options = [*TIMED, f"data.path={text}", "optim.schedule.decay_fraction=0.5", "trainer.accumulate_grad_batches=2"]
    run("train", *options, "minutes=1", "hydra.run.dir=timed run", cwd=tmp_path).succeeded()
    settings = Run(tmp_path / "timed run").settings["trainer"]
    recorded = [f"trainer.{key}={settings[key]}" for key in ("max_steps", "val_check_interval")]
    assert recorded == ["trainer.max_steps=16", "trainer.val_check_interval=15"]
    run("train", *options, *recorded, "hydra.run.dir=whole", cwd=tmp_path).succeeded()
    timed, whole = (metrics(tmp_path / name, "train/loss") for name in ("timed run", "whole"))
    assert timed == whole and max(timed) == 16
    assert "step 16 by trainer.max_steps" in run("train", "resume=timed run", cwd=tmp_path).stdout


SECOND = [  # validation interval, growth, share of the shortest windows, seconds of 15 steps, and steps after the 20th
    (10, 1.0, 1.0, 21.0, 676),  # as planned, with 2 validations: 676 steps and 68 validations take 880 s
    (10, 1.0, 1.0, 42.0, 338),  # twice as slow
    (25, 1.0, 1.0, 15.0, 781),  # no validation yet: 781 steps and 33 validations
    (10, 1.6, 0.6, 15.375, 630),  # a step took 0.625 s, and a later one takes 1.094 s
    (10, 1.9, 0.1, 21.0, 80),  # longer windows came before the second plan, so the first one stays
]


@pytest.mark.parametrize(("interval", "growth", "shortest", "seconds", "more"), SECOND)
def test_the_second_plan_is_as_much_slower_as_the_run_was(interval, growth, shortest, seconds, more):
    """The plan: 100 steps of a second, and validations of 3 s. The run has 1,000 s, of which 880 are left."""
    optim = OptimConfig(schedule=ScheduleConfig(kind="constant", warmup_steps=0))
    first = replace(RUN, trainer=TrainerConfig(max_steps=100, val_check_interval=interval), optim=optim)
    planner = PlanSteps(first, step_seconds=1.0, val_seconds=3.0, end=880.0 + AFTER, most=10_000)
    planner._began = -seconds
    assert planner.new_steps(0.0, growth, shortest) == 20 + more


@pytest.mark.parametrize("interval", [1, 3, 10, 200])
@pytest.mark.parametrize("done", [0, 1, 9])
@pytest.mark.parametrize("seconds", [2.0, 5.0, 37.0, 100.0])
def test_the_most_steps_that_fit_with_their_validations_are_found(interval, done, seconds):
    """Each in 0.5 s and 2 s."""
    done %= interval
    fitting = [n for n in range(1, 300) if 0.5 * n + 2 * -(-(done + n) // interval) <= seconds]
    assert max(0, fit_steps(seconds, 0.5, 2.0, interval, done)) == max(fitting, default=0)
