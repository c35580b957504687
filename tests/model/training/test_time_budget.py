"""minutes=: the size and the steps of a run that ends in time."""

import shlex
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.conftest import NANO_PARTS
from tests.contract.harness import run
from tests.runs import TINY
from tril.model.checkpoint import read_state
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.runs import Run
from tril.model.training import time_budget
from tril.model.training.hardware import Hardware
from tril.model.training.settings import OptimConfig, ScheduleConfig, TrainerConfig
from tril.model.training.time_budget import (
    MEASURED,
    MIN_STEPS,
    PlanSteps,
    Speed,
    TimePlan,
    fit_steps,
    mean_seconds,
    plan_time,
)

# Seconds of a token in training windows of so many, and in validation, and of an optimizer step, of the default model
TRAIN, VAL, STEP = {128: 0.1e-3, 256: 0.12e-3}, 0.04e-3, 0.02
MODEL = GPTConfig(vocab_size=4096, context_length=256, **NANO_PARTS)
TIMED = [setting for setting in TINY if not setting.startswith(("trainer.max_steps", "trainer.val_check_interval"))]


def speed_of(model: GPTConfig, lengths: dict[int, float]) -> Speed:
    """In proportion to layers and width."""
    relative = model.n_layers * model.dim / (4 * 192)
    train = tuple((stop, relative * TRAIN[length]) for length, stop in lengths.items())
    return Speed(train, relative * VAL, relative * STEP)


def measured(models: list[GPTConfig], lengths: dict[int, float], *_) -> list[Speed]:
    """Instead of `measure`."""
    return [speed_of(model, lengths) for model in models]


def seconds_of(plan: TimePlan) -> float:
    return plan.steps * mean_seconds(plan.stages) + -(-plan.steps // plan.val_check_interval) * plan.val_seconds


def plan(
    seconds: float,
    model: GPTConfig = MODEL,
    kept: tuple[str, ...] = (),
    train_tokens: int = 10**9,
    trainer: TrainerConfig = TrainerConfig(),  # noqa: B008
    lengths: dict[int, float] | None = None,
    measure=measured,
) -> TimePlan:
    with mock.patch.object(time_budget, "measure", measure):
        return plan_time(
            model,
            OptimConfig(),
            trainer,
            None,  # the hardware, for `measure`
            end=time.perf_counter() + seconds,
            windows=8,
            val_batch_size=8,
            train_tokens=train_tokens,
            val_tokens=300_000,
            lengths=lengths or {model.context_length: 1.0},
            keeps=kept.__contains__,
        )


def test_more_time_gives_more_tokens_and_larger_models_and_all_of_it_is_used():
    plans = [plan(seconds) for seconds in (60, 180, 600, 3600, 36_000)]
    sizes = [each.model.n_layers * each.model.dim for each in plans]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    for seconds, each in zip((60, 180, 600, 3600, 36_000), plans, strict=True):
        assert (each.model.n_layers, each.model.dim) in MEASURED
        assert 0.85 * seconds - 4 < seconds_of(each) < seconds - time_budget.BEFORE - time_budget.AFTER
    default = plan(600, kept=("model.n_layers", "model.dim"))
    assert default.model == MODEL and mean_seconds(default.stages) == pytest.approx(2048 * TRAIN[256] + STEP)


def test_the_time_of_each_size_decides_and_a_validation_takes_time_besides_its_windows():
    """600 s are best for the largest size, unless its steps take ten times as long as in proportion to the others."""
    assert plan(600).model.dim == 192

    def slow(models, lengths, *_):
        return [
            replace(speed, train=tuple((stop, s * 10 ** (model.dim == 192)) for stop, s in speed.train))
            for model, speed in zip(models, measured(models, lengths), strict=True)
        ]

    chosen = plan(600, measure=slow)
    assert chosen.model.dim == 160
    speed = speed_of(chosen.model, {256: 1.0})
    assert chosen.val_seconds == pytest.approx(chosen.val_batches * 2048 * speed.val + time_budget.BESIDES)


def test_what_is_kept_stays_and_the_rest_is_fitted_around_it():
    assert plan(600, kept=("model.n_layers",)).model.n_layers == MODEL.n_layers
    wide = replace(MODEL, dim=512)
    chosen = plan(60, wide, kept=("model.dim",))
    assert chosen.model.dim == 512 and chosen.model.n_layers < 4
    three_heads = plan(600, replace(MODEL, n_heads=3), kept=()).model
    assert three_heads.n_heads == 3 and three_heads.dim % 3 == 0  # 128, 160, 256 and 320 are left out


def test_a_small_text_is_not_read_too_often_and_gets_dropout():
    large, small, tiny = (plan(3600, train_tokens=n) for n in (10**9, 400_000, 34_000))
    assert [each.model.resid_dropout for each in (large, small, tiny)] == [0, 0, 0.1]
    assert small.steps == small.most == 4 * 400_000 // 2048 and tiny.steps == 200
    assert "so the run ends before the time" in tiny.reasons and "ends before" not in large.reasons
    own = replace(MODEL, resid_dropout=0.3)
    typed = plan(3600, own, ("model.resid_dropout",), train_tokens=34_000)
    assert typed.model.resid_dropout == 0.3


def test_a_kept_number_of_validations_or_of_their_batches_is_part_of_the_time():
    every, some = "trainer.val_check_interval", "trainer.limit_val_batches"
    often = plan(600, kept=(every,), trainer=TrainerConfig(val_check_interval=50))
    assert often.val_check_interval == 50 and often.val_batches < plan(600).val_batches
    whole = plan(600, kept=(every, some), trainer=TrainerConfig(val_check_interval=50))
    assert (whole.val_batches, whole.steps < often.steps) == (-(-300_000 // 2048), True)
    few = plan(600, kept=(some,), trainer=TrainerConfig(limit_val_batches=2))
    assert few.val_batches == 2
    for each in (often, whole, few):
        assert 0.85 * 600 < seconds_of(each) < 600 - time_budget.BEFORE - time_budget.AFTER


def test_a_time_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match=f"of at least {MIN_STEPS}; give more"):
        plan(5)


def test_a_run_whose_time_is_over_is_the_one_of_its_recorded_steps(tmp_path, text, monkeypatch):
    """A fifth of its 40 steps is 8, and the rate decays over the last half, so at least 16 steps are left of them."""

    def planned(model, *_, end, **__):
        assert end < time.perf_counter() + 60 - time_budget.STARTUP
        return TimePlan(model, 40, 15, 3, ((1.0, 1.0),), 0.1, time.perf_counter(), 100, "time    over")

    monkeypatch.setattr(time_budget, "plan_time", planned)
    options = [f"data.path={text}", "optim.schedule.decay_fraction=0.5", "model.resid_dropout=0.1"]
    options += ["~callbacks.samples", "~callbacks.heads", "~callbacks.causality"]
    run("train", *TIMED, *options, "minutes=1", "hydra.run.dir=timed run", cwd=tmp_path).succeeded()
    settings = Run(tmp_path / "timed run").settings["trainer"]
    assert (settings["max_steps"], settings["val_check_interval"], settings["limit_val_batches"]) == (16, 15, 3)
    sample_with = Run(tmp_path / "timed run").summary["sample_with"]
    assert shlex.split(sample_with)[2:] == [f"ckpt={tmp_path / 'timed run'}"]
    recorded = [f"trainer.{key}={settings[key]}" for key in ("max_steps", "val_check_interval", "limit_val_batches")]
    run("train", *TIMED, *options, *recorded, "hydra.run.dir=whole", cwd=tmp_path).succeeded()
    timed, whole = (read_state(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("timed run", "whole"))
    assert timed["tril"]["settings"] == whole["tril"]["settings"] and timed["global_step"] == 16
    for name, weight in whole["state_dict"].items():
        assert torch.equal(timed["state_dict"][name], weight), name
    assert run("train", "resume=timed run", cwd=tmp_path).stdout.endswith("finished its 16 steps; it is unchanged\n")


@pytest.mark.parametrize(
    ("interval", "stages", "more"),
    [
        (10, ((1.0, 1.0),), 620),  # 63 validations fill 10 steps each; the 64th leaves no time for a step
        (25, ((1.0, 1.0),), 780),  # until the 32nd validation, of 3 s as planned; 3 s are left
        (25, ((1.0, 0.5),), 705),  # twice as slow as planned, in validation, too: 29 of 6 s
        (10, ((0.6, 1.0), (1.0, 2.0)), 458),  # half of the later steps take twice as long; 47 validations of 4 s
        (10, ((0.1, 1.0), (1.0, 2.0)), None),  # longer windows came before the second plan
    ],
)
def test_the_second_plan_reads_the_time_of_steps_and_counts_the_validations_of_its_own_steps(interval, stages, more):
    """A second for each step, 4 s for the validation after step 10; without one, the 3 s of the first plan.

    Of 1,000 s, 875.2 or 879.2 are left after step 20.
    """
    first = TimePlan(MODEL, 100, interval, 1, stages, 3.0, 1000.0, 10_000, "")
    recorded, module = [], mock.Mock()
    planner = PlanSteps(first, ScheduleConfig(kind="constant", warmup_steps=0), recorded.append)
    for step in range(1, 30):
        trainer = mock.Mock(global_step=step)
        now = 100.0 + step + (4.0 if step > interval else 0.0)
        with (
            mock.patch.object(time_budget.Metrics, "of", lambda _, step=step: mock.Mock(seconds=lambda: float(step))),
            mock.patch.object(time_budget.time, "perf_counter", lambda now=now: now),
        ):
            planner.on_train_batch_end(trainer, module, None, None, 0)
    assert recorded == ([] if more is None else [20 + more])
    assert module.set_total_steps.mock_calls == [mock.call(n) for n in recorded]


@pytest.mark.parametrize("interval", [1, 3, 10, 200])
@pytest.mark.parametrize("done", [0, 1, 9, 10, 11])
@pytest.mark.parametrize("seconds", [2.0, 5.0, 37.0, 100.0])
def test_the_most_steps_that_fit_with_their_validations_are_found(interval, done, seconds):
    """Each in 0.5 s and 2 s; the validation of step `done` is still to come."""

    def takes(steps: int) -> float:
        return 0.5 * steps + 2 * (-(-(done + steps) // interval) - max(0, done - 1) // interval)

    fitting = [steps for steps in range(1, 300) if takes(steps) <= seconds]
    assert max(0, fit_steps(seconds, 0.5, 2.0, interval, done)) == max(fitting, default=0)


def test_steps_of_each_length_of_windows_are_timed():
    plans = [plan(600, kept=("model.n_layers", "model.dim"), lengths=each) for each in ({128: 0.5, 256: 1.0}, None)]
    short, long = (2048 * TRAIN[length] + STEP for length in (128, 256))
    assert [each.stages for each in plans] == [((0.5, short), (1.0, long)), ((1.0, long),)]
    assert plans[0].steps == pytest.approx(plans[1].steps * 2 * long / (short + long), rel=0.02)


def test_a_timed_step_has_as_many_tokens_in_short_windows_as_in_long_ones_and_models_take_turns(monkeypatch):
    timed, nll = [], GPT.nll

    def recorded(model, ids, *rest):
        timed.append((model.config.dim, *ids.shape))
        return nll(model, ids, *rest)

    monkeypatch.setattr(GPT, "nll", recorded)
    tiny = GPTConfig(vocab_size=11, context_length=4096, n_layers=1, dim=8, n_heads=1)
    lengths = {128: 0.3, 512: 0.7, 4096: 1.0}
    hardware = Hardware("cpu", "32-true", None, "", None)
    speeds = time_budget.measure([tiny, replace(tiny, dim=16)], lengths, OptimConfig(), 10_000, hardware)
    of_a_model = [(16, 128), (4, 512), (1, 4096), (1, 4096)]  # three lengths of training, and validation
    assert timed[:8] == [(dim, *shape) for dim in (8, 16) for shape in of_a_model]
    assert len(timed) >= 24 and timed == timed[:8] * (len(timed) // 8)
    assert len(speeds) == 2
    for speed in speeds:
        assert [stop for stop, _ in speed.train] == [0.3, 0.7, 1.0]
        assert min(speed.val, speed.step, *(seconds for _, seconds in speed.train)) > 0


def test_settings_that_minutes_exclude_are_refused(tmp_path, text):
    for setting, words in (
        ("trainer.max_steps=3", "trainer.max_steps=3 excludes minutes"),
        ("trainer=ddp", "minutes need a single process"),
        ("minutes=0", "minutes=0 must be greater than 0"),
    ):
        run("train", *TIMED, f"data.path={text}", "minutes=1", setting, cwd=tmp_path).refused(words)
