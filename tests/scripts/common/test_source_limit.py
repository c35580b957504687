"""data.exhausted=stop: the steps until a source has been read once, for any size of a step."""

from pathlib import Path

import numpy as np
import pytest

from tests.runs import TINY, composed
from tril.data.sources.files import Files
from tril.scripts.common.resume import Resumed
from tril.scripts.common.run_config import check_config
from tril.scripts.common.source_limit import with_source_limit


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """`with_source_limit` for a run on a.txt and the longer b.txt, half each, with more or less settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"line {i} of the text a.\n" for i in range(80)))
    (tmp_path / "b.txt").write_text("".join(f"line {i} of the text b.\n" for i in range(3000)))
    data = ["data=mixture", "data.tokenizer.kind=byte", "data.sources={a.txt: 1, b.txt: 1}", "data.exhausted=stop"]

    def limited(*overrides, resumed=None):
        base = [*TINY[2:], *data[1:], f"data.cache_dir={tmp_path / 'cache'}", "trainer.max_steps=1000", *overrides]
        cfg = composed(*base, base=data[:1])
        cfg, config, line = with_source_limit(cfg, check_config(cfg), resumed)
        assert config.steps == cfg.trainer.max_steps
        return config.steps, line

    return limited


def training_windows() -> int:
    """Of a.txt: one token per byte, and the first one is no target."""
    n_bytes = sum(len(piece.text) for piece in Files(path="a.txt").pieces("train"))
    return -(-(n_bytes - 1) // 32)


def first_repeat(n_windows: int) -> int:
    """The index of the first window of the second epoch of a.txt, with the order of the blocks written out."""
    found, block = [], 0
    while len(found) <= n_windows:
        order = np.random.default_rng([0, block, 1]).permutation(np.repeat([0, 1], [500, 500]))
        found += (1000 * block + np.flatnonzero(order == 0)).tolist()
        block += 1
    return found[n_windows]


@pytest.mark.parametrize(
    ("overrides", "per_step"),
    [
        ([], 4),
        (["data.batch_size=1"], 1),
        (["trainer.accumulate_grad_batches=3"], 12),
        (["trainer=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "trainer.precision=32-true"], 8),
    ],
)
def test_steps_until_a_source_has_been_read_once(limited, overrides, per_step):
    steps, line = limited(*overrides)
    assert steps == first_repeat(training_windows()) // per_step
    replaced = "which replace trainer.max_steps=1000"
    assert line == f"data.exhausted=stop: a.txt has been read once after {steps} steps, {replaced}"


def test_a_resumed_run_counts_the_windows_of_its_checkpoint(limited):
    """It had 10 steps of 2 windows, and goes on with 4 in each."""
    loops = {"fit_loop": {"state_dict": {"combined_loader": [{"consumed": 20}]}}}
    resumed = Resumed(Path("last.ckpt"), {"global_step": 10, "loops": loops})
    limit = first_repeat(training_windows())
    assert limited(resumed=resumed)[0] == 10 + (limit - 20) // 4


def test_shorter_runs_and_runs_that_repeat_stay_as_they_are(limited):
    assert limited("trainer.max_steps=9") == (9, "")
    assert limited("data.exhausted=repeat") == (1000, "")


def test_no_step_and_too_few_steps_for_the_schedule_are_refused(limited):
    with pytest.raises(ValueError, match="data.exhausted=stop leaves no step: a step takes 900 windows, and a.txt has"):
        limited("data.batch_size=900")
    with pytest.raises(ValueError, match="warmup_steps=100"):
        limited("optim.schedule.warmup_steps=100")
