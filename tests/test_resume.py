"""Going on with a run: as if it had never stopped, wherever its folder is by now, and whatever went wrong in between."""

import json
import shutil

import pytest
import torch

from tests.runs import TINY, Interrupted, command_line, rows, stop_after
from tril import train as train_script
from tril.scripts.common.cli import UserError


def test_resumed_run_equals_the_uninterrupted_one(configure, tmp_path):
    whole = train_script.train(configure("logger=none", folder="whole"))

    cfg = configure("+trainer.limit_train_batches=null", folder="half")
    cfg.trainer.max_steps = 8
    interrupted = stop_after(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tril.model.training.callbacks.samples.Samples.on_validation_end", interrupted)
        with pytest.raises(Interrupted):
            train_script.train(cfg)
    resumed = train_script.train(configure(f"resume={tmp_path / 'half'}", folder="half"))
    assert resumed == pytest.approx(whole, rel=1e-6)


def test_resuming_continues_curves_and_refuses_another_model_or_text(configure, tmp_path, text):
    train_script.train(configure())
    longer = train_script.train(configure(f"resume={tmp_path / 'run'}", folder="run"))
    assert longer["val/loss"] > 0  # nothing was left to do, and nothing broke

    saved = tmp_path / "run" / "config.yaml"
    original = saved.read_text()
    saved.write_text(original.replace("dim: 32", "dim: 64"))
    with pytest.raises(UserError, match="model.dim=64 does not fit .* trained with 32"):
        train_script.train(configure(f"resume={tmp_path / 'run'}"))
    saved.write_text(original)
    text.write_text(text.read_text() + "one more line\n")
    with pytest.raises(UserError, match="the data are not those of"):
        train_script.train(configure(f"resume={tmp_path / 'run'}"))


def files(folder):
    """Path and content of each."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def step_of(checkpoint):
    return torch.load(checkpoint, weights_only=True)["global_step"]


def interrupted_run(configure, folder):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("tril.model.training.callbacks.samples.Samples.on_validation_end", stop_after(4))
        train_script.train(configure(folder=folder))


def longer_run(configure, folder):
    """One of 8 steps that is meant to have 16 now."""
    train_script.train(configure(folder=folder.name))
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace("max_steps: 8", "max_steps: 16"))


@pytest.mark.parametrize("how", [shutil.copytree, shutil.move])
def test_a_folder_that_was_copied_or_moved_goes_on_by_itself(configure, tmp_path, how):
    interrupted_run(configure, "old")
    how(tmp_path / "old", tmp_path / "new")
    before = files(tmp_path / "old")
    train_script.train(configure(f"resume={tmp_path / 'new'}", folder="new"))
    assert files(tmp_path / "old") == before
    assert step_of(tmp_path / "new" / "checkpoints" / "last.ckpt") == 8
    assert str(tmp_path / "old") not in (tmp_path / "new" / "config.yaml").read_text()


def test_a_moved_run_remembers_its_best_loss(configure, tmp_path, monkeypatch):
    longer_run(configure, tmp_path / "old")
    shutil.move(tmp_path / "old", tmp_path / "new")
    monkeypatch.setattr("tril.model.training.module.lr_factor", lambda *rest: 50.0)  # from here on it gets worse
    train_script.train(configure(f"resume={tmp_path / 'new'}", folder="new"))
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["steps"] == 16 and summary["final_val_loss"] > summary["best_val_loss"]
    assert step_of(tmp_path / "new" / "checkpoints" / "best.ckpt") == 8


def test_a_run_may_go_on_in_another_folder(configure, tmp_path, monkeypatch):
    longer_run(configure, tmp_path / "old")
    before = files(tmp_path / "old")
    monkeypatch.setattr("tril.model.training.module.lr_factor", lambda *rest: 50.0)  # from here on it gets worse
    train_script.train(configure(f"resume={tmp_path / 'old'}", folder="fork"))
    assert files(tmp_path / "old") == before
    assert step_of(tmp_path / "fork" / "checkpoints" / "last.ckpt") == 16
    assert (tmp_path / "fork" / "checkpoints" / "best.ckpt").is_file()  # the best of those that it has


def test_what_resuming_refuses_is_not_kept(tmp_path, text):
    first = command_line(*TINY, f"data.path={text}", "hydra.run.dir=run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    settings = (tmp_path / "run" / "config.yaml").read_text()
    for override, message in (
        ("trainer.gradient_clip_val=abc", "gradient_clip_val"),
        (
            "callbacks.samples.temperature=-1",
            "callbacks.samples: temperature=-1",
        ),  # refused by the model's own first look at it
    ):
        done = command_line("resume=run", override, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr, done.stderr
        assert (tmp_path / "run" / "config.yaml").read_text() == settings
    done = command_line("resume=run", "~callbacks.samples", "trainer.max_steps=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "samples" not in (tmp_path / "run" / "config.yaml").read_text()
    assert step_of(tmp_path / "run" / "checkpoints" / "last.ckpt") == 10


def test_command_line_trains_and_resumes_latest(tmp_path, text):
    tiny = [*TINY, f"data.path={text}"]
    first = command_line(*tiny, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    [folder] = tmp_path.glob("outputs/*/*")
    second = command_line("resume=latest", "trainer.max_steps=12", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert list(tmp_path.glob("outputs/*/*")) == [folder]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 12
    assert [int(row["step"]) for row in rows(folder) if row["train/loss"]] == [2, 4, 6, 8, 10, 12]
