"""A run that goes on: in its folder, with the settings of its checkpoint and those that may change."""

import pytest

from tests.contract.harness import BARE, run
from tril.model.checkpoint import Checkpoint, read_state, write_state

SHORT = ("trainer.max_steps=2", "trainer.val_check_interval=2", "data.path=text.txt")


@pytest.fixture
def folder(text):
    """With the folder `run` of a run of 2 steps, on a text with a relative path."""
    run("train", *BARE, *SHORT, "hydra.run.dir=run", cwd=text.parent).succeeded()
    return text.parent


def test_a_folder_with_a_run_is_no_folder_of_a_new_one(folder):
    (folder / "killed").mkdir()
    (folder / "killed" / "config.yaml").touch()  # before its first checkpoint
    for name in ("run", "killed", ""):
        run("train", *BARE, *SHORT, f"hydra.run.dir={name}", cwd=folder).refused("hydra.run.dir", name)


def test_a_finished_run_is_unchanged_without_more_steps(folder):
    before = {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}
    assert "at step 2 by trainer.max_steps" in run("train", "resume=run", cwd=folder).succeeded().stdout
    run("train", "resume=run", "optim.lr=0.5", cwd=folder).refused("optim.lr", "trainer.max_steps")
    assert before == {path: path.read_bytes() for path in (folder / "run").rglob("*") if path.is_file()}


def test_given_settings_of_the_list_replace_those_of_the_checkpoint_and_others_are_kept(folder, tmp_path):
    (folder / "elsewhere").mkdir()
    path = folder / "run" / "checkpoints" / "last.ckpt"
    before, state = Checkpoint.read(path).settings, read_state(path)
    state["tril"] |= {"code": "0" * 64, "torch_version": "1.0.0"}
    write_state(path, state)
    (folder / "run" / "config.yaml").write_text("seed: 7\n")  # only for its reader
    words = ("resume=../run", "trainer.max_steps=1e1", "optim.lr=0.25", f"data.cache_dir={folder / 'cache'}")
    done = run("train", *words, cwd=folder / "elsewhere").succeeded()
    assert done.stdout.splitlines()[0].endswith("continues at step 2 of 10")
    changes = {"trainer.max_steps": 10, "optim.lr": 0.25, "data.cache_dir": str(folder / "cache")}
    assert Checkpoint.read(path).settings == before | changes
    assert "1.0" in done.stderr and "0" * 12 in done.stderr  # other versions are warnings
