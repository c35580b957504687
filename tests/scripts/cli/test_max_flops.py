"""trainer.max_flops decides the steps of a run, whose FLOPs depend on the vocabulary of its text."""

import pytest

from tests.conftest import assert_refused
from tests.runs import TINY, in_process, typed
from tril.scripts.cli.command_line import compose
from tril.scripts.cli.config import RunConfig


@pytest.mark.parametrize("dim", [32, 64])
def test_the_steps_cost_as_many_flops_with_the_vocabulary_of_the_text(tmp_path, text, dim):
    """Of characters, which the settings do not tell."""
    settings = ("data.tokenizer.kind=char", "trainer.max_flops=9e9", "trainer.max_steps=400")
    more = ("trainer.val_check_interval=100", f"model.dim={dim}", "trainer.accumulate_grad_batches=2")
    line = typed(f"data.path={text}", f"data.cache_dir={tmp_path}", *settings, *more)
    config = RunConfig.of(compose("train", line).settings, line)
    config = config.fitted(config.data.prepare().meta["vocab_size"])
    vocabulary = len({*text.read_text()} | {"<|endoftext|>"})
    flops = 6 * (2 * (12 * dim**2 + 2 * dim + dim) + dim + vocabulary * dim) + 12 * 2 * dim * 33 // 2
    assert config.steps * flops * 2 * 4 * 32 == pytest.approx(9e9, rel=0.02)
    assert -(-config.steps // config.trainer.val_check_interval) == 4


def test_train_refuses_too_few_in_one_line_before_training(tmp_path, text):
    done = in_process(*TINY, f"data.path={text}", "trainer.max_flops=1e8", cwd=tmp_path)
    done.stderr = done.stderr.splitlines(keepends=True)[-1]  # without the line of the prepared text
    assert_refused(done, "trainer.max_flops=1e+08 leave ")
    assert not (tmp_path / "outputs").exists()
