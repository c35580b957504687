"""When a run writes checkpoints: at the ends of optimizer steps, by number or by time."""

import pytest

from tril.model.checkpoint import read_state
from tril.model.training.checkpoints import CheckpointFiles

BYTES = ("~callbacks.samples", "~callbacks.heads", "~callbacks.causality", "data.tokenizer.kind=byte")


def steps_of(folder):
    return {path.name: read_state(path)["global_step"] for path in sorted(folder.iterdir())}


@pytest.fixture
def written(monkeypatch):
    """The step and the name of each checkpoint that a run writes."""
    written, original = [], CheckpointFiles.save_checkpoint

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        written.append((checkpoint["global_step"], path.stem))
        original(self, checkpoint, path)

    monkeypatch.setattr(CheckpointFiles, "save_checkpoint", save_checkpoint)
    return written


def test_a_run_writes_checkpoints_at_ends_of_steps_and_keeps_the_last_and_the_best(train_tiny, written, monkeypatch):
    rise = lambda step, *rest: 1.0 if step < 4 else 50.0  # noqa: E731  the loss is worse from step 5 on
    monkeypatch.setattr("tril.model.training.module.lr_factor", rise)
    accumulated = ["trainer.accumulate_grad_batches=3", "data.batch_size=2", "checkpoint.every_minutes=null"]
    folder = train_tiny(*BYTES, *accumulated, "checkpoint.every_n_steps=3").folder / "checkpoints"
    assert written == [(3, "last"), (4, "best"), (4, "last"), (6, "last"), (8, "last")]  # the last step is validated
    assert steps_of(folder) == {"best.ckpt": 4, "last.ckpt": 8}
    [loader] = read_state(folder / "last.ckpt")["loops"]["fit_loop"]["state_dict"].values()
    assert loader == [{"consumed": 8 * 3 * 2}]  # a longer run goes on with the next windows


def test_a_run_writes_checkpoints_by_time(train_tiny, written):
    train_tiny(*BYTES, "checkpoint.every_minutes=1e-9", "trainer.max_steps=3")
    assert [step for step, name in written if name == "last"] == [1, 2, 3]
