"""minutes=: the size and the steps of a run that ends in time."""

import shlex
import time
from dataclasses import astuple, replace
from unittest import mock

import pytest
import torch

from tests.conftest import assert_refused
from tests.runs import TINY, in_process
from tril.model.checkpoint import read_state
from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.runs import Run
from tril.model.training import run_estimate, time_budget
from tril.model.training.hardware import Hardware
from tril.model.training.run_estimate import Speed
from tril.model.training.settings import OptimConfig, ScheduleConfig, TrainerConfig
from tril.model.training.time_budget import MEASURED, MIN_STEPS, PlanSteps, TimePlan, mean_seconds, plan_time

# Seconds of a window of so many tokens and of an optimizer step, of the default model
SPEED = {256: Speed(train=0.03, val=0.01, step=0.02), 128: Speed(train=0.012, val=0.005, step=0.02)}
MODEL = GPTConfig(vocab_size=4096, context_length=256)
TIMED = [setting for setting in TINY if not setting.startswith(("trainer.max_steps", "trainer.val_check_interval"))]


def measured(model: GPTConfig, *_) -> Speed:
    """Instead of `measure`; in proportion to layers and width."""
    relative = model.n_layers * model.dim / (4 * 192)
    return Speed(*(relative * x for x in astuple(SPEED[model.context_length])))


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
        used = each.steps * mean_seconds(each.stages) + each.val_seconds
        assert 0.85 * seconds - 4 < used < seconds - 3
    default = plan(600, kept=("model.n_layers", "model.dim"))
    assert default.model == MODEL and mean_seconds(default.stages) == pytest.approx(8 * 0.03 + 0.02)


def test_the_time_of_each_size_decides_and_a_validation_takes_time_besides_its_windows():
    """600 s are best for the largest size, unless its steps take ten times as long as in proportion to the others."""
    assert plan(600).model.dim == 192
    chosen = plan(
        600, measure=lambda model, *_: Speed(*(x * 10 ** (model.dim == 192) for x in astuple(measured(model))))
    )
    assert chosen.model.dim == 160
    seconds = chosen.val_batches * 8 * measured(chosen.model).val
    assert chosen.val_seconds == pytest.approx(chosen.validations * (seconds + time_budget.BESIDES))


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
        assert each.steps * mean_seconds(each.stages) + each.val_seconds < 600 - 3


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
    done = in_process(*TIMED, *options, "minutes=1", "hydra.run.dir=timed run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    settings = Run(tmp_path / "timed run").settings["trainer"]
    assert (settings["max_steps"], settings["val_check_interval"], settings["limit_val_batches"]) == (16, 15, 3)
    sample_with = Run(tmp_path / "timed run").summary["sample_with"]
    assert shlex.split(sample_with)[2:] == [f"ckpt={tmp_path / 'timed run'}"]
    recorded = [f"trainer.{key}={settings[key]}" for key in ("max_steps", "val_check_interval", "limit_val_batches")]
    assert in_process(*TIMED, *options, *recorded, "hydra.run.dir=whole", cwd=tmp_path).returncode == 0
    timed, whole = (read_state(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("timed run", "whole"))
    assert timed["tril"]["settings"] == whole["tril"]["settings"] and timed["global_step"] == 16
    for name, weight in whole["state_dict"].items():
        assert torch.equal(timed["state_dict"][name], weight), name
    assert in_process("resume=timed run", cwd=tmp_path).stdout.endswith("finished its 16 steps; it is unchanged\n")


@pytest.mark.parametrize(
    ("interval", "stages", "steps"),
    [
        (10, ((1.0, 1.0),), 20 + 838),
        (25, ((1.0, 1.0),), 20 + 1000 - 120 - 2 - 4 * 3),
        (25, ((1.0, 0.5),), 20 + 1000 - 120 - 2 - 4 * 6),  # twice as slow as planned, in validation, too
        (10, ((0.6, 1.0), (1.0, 2.0)), 20 + int(838 / 1.5)),  # half of the later steps take twice as long
        (10, ((0.1, 1.0), (1.0, 2.0)), None),  # longer windows came before the second plan
    ],
)
def test_the_second_plan_reads_the_time_of_steps_and_of_a_validation(interval, stages, steps):
    """A second for each step, 4 s for the validation after step 10; without one, the 3 s of the first plan."""
    first = TimePlan(MODEL, 100, interval, 1, stages, 3.0 * 100 / interval, 1000.0, 10_000, "")
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
    assert recorded == ([] if steps is None else [steps])
    assert module.set_total_steps.mock_calls == [mock.call(n) for n in recorded]


def test_steps_of_each_length_of_windows_are_timed():
    plans = [plan(600, kept=("model.n_layers", "model.dim"), lengths=each) for each in ({128: 0.5, 256: 1.0}, None)]
    short, long = 16 * SPEED[128].train + SPEED[128].step, 8 * SPEED[256].train + SPEED[256].step
    assert [each.stages for each in plans] == [((0.5, short), (1.0, long)), ((1.0, long),)]
    assert short < long and plans[0].steps == pytest.approx(plans[1].steps * 2 * long / (short + long), rel=0.02)


def test_longer_windows_are_never_planned_to_take_less_time():
    with mock.patch.dict(SPEED, {128: Speed(train=0.02, val=0.005, step=0.02)}):
        found = plan(600, kept=("model.n_layers", "model.dim"), lengths={128: 0.5, 256: 1.0}).stages
    assert found == ((0.5, 16 * 0.02 + 0.02), (1.0, 16 * 0.02 + 0.02))


def test_a_timed_step_has_as_many_tokens_in_short_windows_as_in_long_ones(monkeypatch):
    shapes, nll = set(), GPT.nll
    monkeypatch.setattr(GPT, "nll", lambda model, ids, *rest: shapes.add((*ids.shape,)) or nll(model, ids, *rest))
    for length in (128, 512, 4096):
        tiny = GPTConfig(vocab_size=11, context_length=length, n_layers=1, dim=8, n_heads=1)
        run_estimate.measure(tiny, OptimConfig(), 20, Hardware("cpu", "32-true", None, "", None))
    assert shapes == {(16, 128), (4, 512), (1, 4096)}


def test_settings_that_minutes_exclude_are_refused(tmp_path, text):
    for setting, words in (
        ("trainer.max_steps=3", "trainer.max_steps=3 excludes minutes"),
        ("trainer=ddp", "minutes need a single process"),
        ("minutes=0", "minutes=0 must be greater than 0"),
    ):
        assert_refused(in_process(*TIMED, f"data.path={text}", "minutes=1", setting, cwd=tmp_path), words)
