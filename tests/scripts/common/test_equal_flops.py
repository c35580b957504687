"""The steps of a run from the FLOPs of its base run, for any text, context, depth and vocabulary."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from tests.conftest import assert_refused
from tests.runs import TINY, composed, in_process
from tril.scripts.ablation import grid
from tril.scripts.common.equal_flops import solve, with_equal_flops
from tril.scripts.common.run_config import check_config

BASE = ["+equal_flops.dim=192", "trainer.accelerator=cpu"]


def solved(*overrides: str):
    cfg = composed(*overrides, base=BASE)
    return with_equal_flops(cfg, check_config(cfg))


def flops(dim: int, *, layers: int, vocabulary: int, context: int) -> int:
    """Of one token by hand: relu2, a tied head; 6 for each weight, 12 for each visible key and unit of a head."""
    gains = 2 * dim + 2 * dim // 4
    weights = layers * (4 * dim**2 + 8 * dim**2 + gains) + dim + vocabulary * dim
    return 6 * weights + 12 * layers * dim * (context + 1) // 2


@pytest.mark.parametrize(
    "layers, vocabulary, context", [(4, 4096, 256), (4, 96, 256), (12, 4096, 64), (1, 50_000, 1024), (2, 256, 2048)]
)
@pytest.mark.parametrize("dim", [96, 128, 256, 384])
def test_training_flops_are_those_of_the_base_run(layers, vocabulary, context, dim):
    shape = {"layers": layers, "vocabulary": vocabulary, "context": context}
    cfg, config = solved(
        f"model.dim={dim}", f"model.n_layers={layers}", f"model.vocab_size={vocabulary}",
        f"model.context_length={context}", "trainer.max_steps=2400", "trainer.val_check_interval=400",
    )  # fmt: skip
    assert config.steps * flops(dim, **shape) == pytest.approx(2400 * flops(192, **shape), rel=0.02)
    assert config.steps == cfg.trainer.max_steps != 2400
    assert math.ceil(config.steps / cfg.trainer.val_check_interval) == 6


def test_the_base_run_keeps_its_settings():
    cfg, config = solved("model.vocab_size=4096", "trainer.max_steps=901", "trainer.val_check_interval=100")
    assert (config.steps, cfg.trainer.val_check_interval) == (901, 100)


def test_micro_batches_of_a_step():
    """The interval counts steps, whatever the micro-batches: 6 validations of the base run are 6 of this one."""
    wide = ("model.vocab_size=4096", "model.dim=384", "trainer.accumulate_grad_batches=4")
    cfg, config = solved(*wide, "trainer.val_check_interval=150")
    assert (config.steps, cfg.trainer.val_check_interval, config.val_interval) == (274, 46, 4 * 46)


def test_the_base_run_may_have_another_context():
    """Half the context, with half the tokens of a step."""
    long = {"layers": 4, "vocabulary": 4096, "context": 256}
    _, config = solved(
        "model.vocab_size=4096", "~equal_flops", "+equal_flops.context_length=128", "trainer.val_check_interval=50"
    )
    target = 900 * 128 * flops(192, **long | {"context": 128})
    assert config.steps * 256 * flops(192, **long) == pytest.approx(target, rel=0.02)


def test_without_the_key_nothing_changes():
    cfg = composed("model.dim=96", base=[])
    config = check_config(cfg)
    assert with_equal_flops(cfg, config) == (cfg, config) and config.steps == 900


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["+equal_flops.size=1"], r"there is no setting equal_flops\.size"),
        (["~equal_flops", "+equal_flops=3"], r"equal_flops=3 must have the settings of the base run's model"),
        (["equal_flops.dim=190"], r"model\.n_heads=4 must divide model\.dim=190"),
        (["model.dim=384", "trainer.max_steps=60"], r"optim\.schedule\.warmup_steps=20 is longer than the run of 18"),
    ],
)
def test_wrong_settings_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        solved("model.vocab_size=4096", *overrides)


def test_too_few_steps_are_refused_with_the_number_that_suffices():
    """18.3 steps are rounded to 18, 12.5 to 12, which is 3.9 % off."""
    wide = ("model.vocab_size=4096", "model.dim=384", "optim.schedule.warmup_steps=0")
    assert solved(*wide, "trainer.max_steps=60")[1].steps == 18
    message = (
        r"^trainer\.max_steps=41 of the base run leave 12\.5 steps at model\.dim=384, and 12 are 3\.9% off "
        r"\(limit 2%\); use trainer\.max_steps=83 or more$"
    )
    with pytest.raises(ValueError, match=message):
        solved(*wide, "trainer.max_steps=41")
    config = check_config(composed(*wide, base=BASE))
    for steps in range(83, 120):
        longer = replace(config, trainer=replace(config.trainer, max_steps=steps))
        assert solve(longer, {"dim": 192}, 4096)[0] == round(steps * 274.025 / 900)


CHARACTERS = ["data.tokenizer.kind=char", "+equal_flops.dim=32"]


def test_the_vocabulary_is_that_of_the_text(tmp_path, text):
    """Of characters, which the settings do not tell."""
    more = ("trainer.max_steps=400", "trainer.val_check_interval=100", "data.tokenizer.vocab_size=4096")
    cfg = composed(f"data.path={text}", f"data.cache_dir={tmp_path}", *CHARACTERS, "model.dim=64", *more)
    vocabulary = len({*text.read_text()} | {"<|endoftext|>"})
    _, config = with_equal_flops(cfg, check_config(cfg))
    own, base = (
        6 * (2 * (12 * dim**2 + 2 * dim + dim) + dim + vocabulary * dim) + 12 * 2 * dim * 33 // 2 for dim in (64, 32)
    )
    assert config.steps * own == pytest.approx(400 * base, rel=0.02)


@pytest.mark.slow
def test_train_uses_the_solved_steps_and_resume_keeps_them(tmp_path, text):
    """Here a wider run has fewer; the settings of the run have the numbers, so that it can be resumed."""
    base = ["model.dim=64", "trainer.max_steps=60", "trainer.val_check_interval=60"]
    command = [*TINY, f"data.path={text}", *CHARACTERS, *base, "callbacks.samples.max_new_tokens=1"]
    done = in_process(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [folder] = tmp_path.glob("outputs/*/*")
    trainer = yaml.safe_load((folder / "config.yaml").read_text())["trainer"]
    steps = trainer["max_steps"]
    assert steps == trainer["val_check_interval"] and 15 < steps < 30
    assert f"run     {steps} steps" in done.stdout
    again = in_process(f"resume={folder}", f"trainer.max_steps={steps + 2}", cwd=tmp_path)
    assert again.returncode == 0 and f"run     {steps + 2} steps" in again.stdout, again.stderr


def test_a_grid_plans_the_solved_steps(tmp_path, text, monkeypatch):
    planned = []
    speed = SimpleNamespace(run=lambda **counts: planned.append((counts["steps"], counts["validations"])) or 1.0)
    monkeypatch.setattr("tril.model.training.run_estimate.measure", lambda *arguments: speed)
    more = ("trainer.max_steps=400", "trainer.val_check_interval=100")
    settings = [
        composed(f"data.path={text}", f"data.cache_dir={tmp_path}", *CHARACTERS, *more, f"model.dim={dim}")
        for dim in (16, 32, 64)
    ]
    runs, rejected = grid.estimate_runs([grid.PlannedRun([], cfg, check_config(cfg)) for cfg in settings])
    assert rejected == [] and [count for _, count in planned] == [4, 4, 4]
    totals = [steps * run.sizes["flops_per_token"] for (steps, _), run in zip(planned, runs, strict=True)]
    assert totals == pytest.approx([totals[1]] * 3, rel=0.02) and planned[1][0] == 400
    assert [run.config.steps for run in runs] == [run.cfg.trainer.max_steps for run in runs] == [n for n, _ in planned]

    short = [composed(f"data.path={text}", f"data.cache_dir={tmp_path}", *CHARACTERS, "model.dim=64")]
    runs, [refused] = grid.estimate_runs([grid.PlannedRun([], cfg, check_config(cfg)) for cfg in short])
    assert runs == [] and refused.reason.startswith("trainer.max_steps=8 of the base run leave 2.")


def test_train_refuses_in_one_line_before_training(tmp_path, text):
    done = in_process(*TINY, f"data.path={text}", "+equal_flops.dim=16", cwd=tmp_path)
    done.stderr = done.stderr.splitlines(keepends=True)[-1]  # without the line of the prepared text
    assert_refused(done, "trainer.max_steps=8 of the base run leave ")
    assert not list(tmp_path.glob("outputs/*/*/config.yaml"))
