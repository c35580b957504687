"""A run that goes on: in its folder, with the settings of its checkpoint and those that may change."""

import shutil

from tests.contract.harness import BARE, run
from tril.model.checkpoint import Checkpoint


def test_a_folder_with_a_run_is_no_folder_of_a_new_one(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "killed").mkdir()
    (tmp_path / "killed" / "config.yaml").touch()  # before its first checkpoint
    for name in ("run", "killed", ""):
        run("train", *BARE, f"hydra.run.dir={name}", cwd=tmp_path).refused("hydra.run.dir", name)


def test_a_finished_run_is_unchanged_without_more_steps(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert "at step 8 by trainer.max_steps" in run("train", "resume=run", cwd=tmp_path).succeeded().stdout
    run("train", "resume=run", "optim.lr=0.5", cwd=tmp_path).refused("optim.lr", "trainer.max_steps")
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_given_settings_replace_those_of_the_checkpoint_and_relative_paths_are_kept(text, tmp_path):
    steps = ("trainer.max_steps=2", "trainer.val_check_interval=2", "hydra.run.dir=run")
    run("train", *BARE, *steps, f"data.path={text.name}", cwd=tmp_path).succeeded()
    (tmp_path / "elsewhere").mkdir()
    path = tmp_path / "run" / "checkpoints" / "last.ckpt"
    before = Checkpoint.read(path).settings
    words = ("resume=../run", "trainer.max_steps=1e1", "optim.lr=0.25", f"data.cache_dir={tmp_path / 'cache'}")
    run("train", *words, cwd=tmp_path / "elsewhere").succeeded()
    changes = {"trainer.max_steps": 10, "optim.lr": 0.25, "data.cache_dir": str(tmp_path / "cache")}
    assert Checkpoint.read(path).settings == before | changes
