"""`tril plan`: the tables, and the arithmetic of the projection."""

import re

import pytest

from tests.calls import call
from tril.scripts import plan
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.typed import Typed
from tril.scripts.planning.plan_config import KEYS, parse
from tril.scripts.planning.plan_text import duration
from tril.scripts.planning.projection import project

TINY = ["model.n_layers=2", "model.dim=32", "model.n_heads=8", "model.context_length=16", "model.vocab_size=320"]
TINY += ["data.batch_size=4", "trainer.accelerator=cpu", "trainer.precision=32-true", "optim.schedule.warmup_steps=0"]
MATRICES, TABLE, GAINS = 2 * 12 * 32 * 32, 320 * 32, 2 * (2 * 32 + 2 * 4) + 32
PARAMETERS = MATRICES + TABLE + GAINS


def projected(world_size, *overrides):
    settings = compose("plan", Typed.of([*TINY, *overrides])).settings
    run = RunConfig.of({key: value for key, value in settings.items() if key not in KEYS})
    return project(run.on_this_machine(), parse(settings), world_size)


def test_other_settings_are_those_of_train_py():
    settings = compose("plan", Typed()).settings
    run = {key: value for key, value in settings.items() if key not in KEYS}
    assert RunConfig.of(run) == RunConfig.of(compose("train", Typed()).settings)
    assert set(settings) - set(run) == set(KEYS)


def test_ddp_copies_the_model_and_reduces_its_gradients():
    found = projected(8, "trainer.accumulate_grad_batches=3")
    assert found.tokens == 8 * 3 * 4 * 16
    assert found.memory.weights == pytest.approx(4 * PARAMETERS, rel=0.01)  # and the rotary tables
    assert found.memory.buckets == found.memory.gradients == 4 * PARAMETERS
    assert found.sent == {"gradients": 2 * 7 / 8 * 4 * PARAMETERS}


def test_time_follows_from_the_assumptions():
    found = projected(4, "mfu=0.5", "gpu=A100", "link=10")
    flops = 6 * PARAMETERS + 12 * 2 * 32 * 16  # PaLM, appendix B; the tied table is the head
    assert found.compute == pytest.approx(4 * 16 * flops / (312e12 * 0.5))
    assert found.communication == pytest.approx(2 * 3 / 4 * 4 * PARAMETERS / 10e9)
    assert found.seconds == found.compute + found.communication


def test_fsdp_divides_rows_and_gathers_blocks():
    found = projected(64, "trainer=fsdp", "optim=adamw")
    # of each block a row of q, k, v and o, 2 of up, one of down; 5 of the table; one number of each gain
    share = 4 * (2 * (4 * 32 + 2 * 32 + 128) + 5 * 32 + 2 * 4 + 1)
    assert found.memory.gradients == share
    assert found.memory.optimizer == 2 * share
    assert found.memory.gathered == 4 * (MATRICES // 2 + (GAINS - 32) // 2 + TABLE + 32)
    blocks = 4 * (MATRICES + GAINS - 32)
    assert found.sent["weights"] == pytest.approx(63 / 64 * (2 * blocks + 4 * (TABLE + 32)))
    assert found.sent["gradients"] == pytest.approx(63 / 64 * 4 * PARAMETERS)
    assert found.sent["Muon's matrices"] == 0


def test_muon_gathers_its_matrices_on_every_device():
    for world_size in (8, 64):
        found = projected(world_size, "trainer=fsdp")
        assert found.sent["Muon's matrices"] == pytest.approx((1 - 1 / world_size) * 4 * MATRICES)
        assert found.memory.update >= 6 * 4 * 2 * 4 * 32 * 32  # copies of the largest group of equal matrices


def test_more_memory_fits_more_windows():
    small, large = (projected(8, f"gpu_memory={memory}").largest_batch for memory in (0.01, 0.02))
    assert 4 < small and large == pytest.approx(2 * small, rel=0.1)
    assert projected(8, "gpu_memory=0.0001").largest_batch == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.01234, "12.3 ms"), (1.5, "1.5 s"), (61, "00:01:01"), (90000, "1.0 days")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_command_prints_memory_time_and_assumptions(tmp_path, monkeypatch):
    from tril.model.training.run_estimate import Speed

    monkeypatch.setattr("tril.model.training.run_estimate.measure", lambda *_: Speed(train=0.5, val=0.1, step=1.0))
    monkeypatch.setattr("tril.model.training.hardware.keep_freed_memory", lambda: None)  # of the whole process
    done = call(plan.main, *TINY, "trainer.max_steps=10", "gpus=[8,64]", "mfu=0.3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{PARAMETERS:,} parameters" in done.stdout
    lines = {re.split("  +", line)[0]: re.split("  +", line)[1:] for line in done.stdout.splitlines()}
    assert lines["KV cache of sampling, 16 tokens"] == ["8.19 kB"]  # 2 tensors, 2 layers, 8 heads of 4, 16 positions
    assert lines["time"] == ["3 s", "38 s"]  # 4 windows and an update; 10 steps and 8 s besides them
    assert "mfu=0.3 of 989 TFLOP/s (gpu=H100" in done.stdout
    assert len(done.stdout.splitlines()) <= 40 and list(tmp_path.iterdir()) == []
