"""Resuming a run: as if it had never stopped, also after its folder was moved."""

import json
import shutil

import pytest
import torch
import yaml

from tests.runs import TINY, in_process, interrupted, rows
from tril import train as train_script
from tril.scripts.common.cli import UserError
from tril.scripts.common.targets import RENAMED


def test_resumed_run_equals_the_uninterrupted_one(configure, tmp_path):
    whole = train_script.train(configure(folder="whole"))

    cfg = configure("+trainer.limit_train_batches=null", folder="half")
    cfg.trainer.max_steps = 8
    with interrupted():
        train_script.train(cfg)
    resumed = train_script.train(configure(f"resume={tmp_path / 'half'}", folder="half"))
    assert resumed == pytest.approx(whole, rel=1e-6)


def test_rows_and_samples_after_the_checkpoint_are_written_once(configure, tmp_path):
    """The process was killed after it had logged step 6, sampled, and begun another row."""
    train_script.train(configure(folder="whole"))
    with interrupted():
        train_script.train(configure(folder="half"))
    half = tmp_path / "half"
    with (half / "samples.txt").open("a") as samples:
        samples.write("--- sample at step 6 ---\nlost")
    log = half / "csv" / "version_0" / "metrics.csv"
    with log.open() as file:
        columns = file.readline().rstrip("\n").split(",")
    with log.open("a") as file:
        file.write(",".join("6" if name == "step" else "9.0" for name in columns) + "\n9.0,9")
    train_script.train(configure(f"resume={half}", folder="half"))
    assert (half / "samples.txt").read_bytes() == (tmp_path / "whole" / "samples.txt").read_bytes()
    names = ("step", "train/loss", "val/loss", "grad_norm/total", "heads/entropy/L0H0")
    expected, found = (
        [[row[name] for name in names] for row in rows(tmp_path / folder)] for folder in ("whole", "half")
    )
    assert found == expected and len(found) > 6


def test_a_sample_that_no_checkpoint_counts_is_written_once(configure, tmp_path, monkeypatch):
    """The process was killed after its first sample; its checkpoint is that of step 2."""
    from tril.model.training.callbacks.checkpoints import Checkpoints

    settings = ("checkpoint.every_n_steps=2", "callbacks.causality=null")
    train_script.train(configure(*settings, folder="whole"))
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Checkpoints, "on_validation_end", lambda *_: 1 / 0)
        train_script.train(configure(*settings, folder="half"))
    train_script.train(configure(f"resume={tmp_path / 'half'}", folder="half"))
    assert (tmp_path / "half" / "samples.txt").read_bytes() == (tmp_path / "whole" / "samples.txt").read_bytes()


def test_resuming_continues_curves_and_refuses_another_model_or_text(configure, tmp_path, text):
    train_script.train(configure())
    longer = train_script.train(configure(f"resume={tmp_path / 'run'}", folder="run"))
    assert longer["val/loss"] > 0  # nothing was left to do, and nothing broke

    saved = tmp_path / "run" / "config.yaml"
    original = saved.read_text()
    saved.write_text(original.replace("dim: 32", "dim: 64"))
    with pytest.raises(UserError, match="model.dim=64 must be 32, as in "):
        train_script.train(configure(f"resume={tmp_path / 'run'}"))
    saved.write_text(original)
    text.write_text(text.read_text() + "one more line\n")
    with pytest.raises(UserError, match="the data .* must be those of"):
        train_script.train(configure(f"resume={tmp_path / 'run'}"))


def files(folder):
    """Path and content of each."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def step_of(checkpoint):
    return torch.load(checkpoint, weights_only=True)["global_step"]


def interrupted_run(configure, folder):
    with interrupted():
        train_script.train(configure(folder=folder))


def half_run(configure, folder):
    """8 of 16 steps."""
    with interrupted():
        train_script.train(configure("trainer.max_steps=16", "trainer.val_check_interval=8", folder=folder.name))


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
    half_run(configure, tmp_path / "old")
    shutil.move(tmp_path / "old", tmp_path / "new")
    monkeypatch.setattr("tril.model.training.module.lr_factor", lambda *rest: 50.0)  # from here on it gets worse
    train_script.train(configure(f"resume={tmp_path / 'new'}", folder="new"))
    summary = json.loads((tmp_path / "new" / "summary.json").read_text())
    assert summary["steps"] == 16 and summary["final_val_loss"] > summary["best_val_loss"]
    assert step_of(tmp_path / "new" / "checkpoints" / "best.ckpt") == 8


def test_a_run_may_go_on_in_another_folder(configure, tmp_path, monkeypatch):
    half_run(configure, tmp_path / "old")
    before = files(tmp_path / "old")
    monkeypatch.setattr("tril.model.training.module.lr_factor", lambda *rest: 50.0)  # from here on it gets worse
    train_script.train(configure(f"resume={tmp_path / 'old'}", folder="fork"))
    assert files(tmp_path / "old") == before
    assert step_of(tmp_path / "fork" / "checkpoints" / "last.ckpt") == 16
    assert (tmp_path / "fork" / "checkpoints" / "best.ckpt").is_file()  # the best of those that it has


def test_what_resuming_refuses_is_not_kept(tmp_path, text):
    first = in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    settings = (tmp_path / "run" / "config.yaml").read_text()
    for override, message in (
        ("trainer.gradient_clip_val=abc", "gradient_clip_val"),
        (
            "callbacks.samples.temperature=-1",
            "callbacks.samples.temperature=-1 must be",
        ),  # refused by the model's own first look at it
    ):
        done = in_process("resume=run", override, cwd=tmp_path)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and message in done.stderr, done.stderr
        assert (tmp_path / "run" / "config.yaml").read_text() == settings
    done = in_process("resume=run", "~callbacks.samples", "trainer.max_steps=10", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "samples" not in (tmp_path / "run" / "config.yaml").read_text()
    assert step_of(tmp_path / "run" / "checkpoints" / "last.ckpt") == 10


def test_temporary_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path, text):
    first = in_process(*TINY, f"data.path={text}", "trainer.max_steps=4", "hydra.run.dir=run", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folder, process = tmp_path / "run", 2**31 - 2  # no process has this id
    names = [
        f".causality.json.{process}.part",
        f"checkpoints/.last.ckpt-new.{process}.part",
        f"csv/version_0/.metrics.csv.{process}.part",
    ]
    for name in names:
        (folder / name).write_text("half")
    done = in_process("resume=run", "trainer.max_steps=8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(folder.rglob("*.part")) == []


def test_command_line_trains_and_resumes_latest(tmp_path, text):
    tiny = [*TINY, f"data.path={text}"]
    first = in_process(*tiny, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    [folder] = tmp_path.glob("outputs/*/*")
    second = in_process("resume=latest", "trainer.max_steps=12", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert list(tmp_path.glob("outputs/*/*")) == [folder]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 12
    assert [int(row["step"]) for row in rows(folder) if row["train/loss"]] == [2, 4, 6, 8, 10, 12]


def test_a_run_of_the_version_before_the_renamed_packages_resumes_to_the_bit(configure, tmp_path):
    """Its config.yaml has other targets, callbacks that were replaced, and no keys that came later."""
    for folder in ("new", "old"):
        with interrupted():
            train_script.train(configure("model.resid_dropout=0.1", folder=folder))
    settings = tmp_path / "old" / "config.yaml"
    content = yaml.safe_load(settings.read_text())
    for later in ("allow_targets", "allow_changes", "causality", "checkpoint"):
        del content[later]
    content["logger"] = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path / "old")}
    old_names = {new: old for old, new in RENAMED.items()}
    for name, callback in list(content["callbacks"].items()):
        if (old := old_names.get(callback["_target_"])) is None:
            del content["callbacks"][name]
        callback["_target_"] = old
    content["callbacks"]["last"] = {
        "_target_": "model.training.checkpoints.Checkpoint",
        "dirpath": str(tmp_path / "old" / "checkpoints"),
        "filename": "last",
    }
    settings.write_text(yaml.safe_dump(content))
    assert "tril." not in settings.read_text() and "model.training.callbacks.Samples" in settings.read_text()
    results = [train_script.train(configure(f"resume={tmp_path / name}", folder=name)) for name in ("new", "old")]
    assert results[0] == results[1]


def test_a_run_of_the_version_whose_interval_counted_micro_batches_resumes_to_the_bit(configure, tmp_path):
    """It validated after 5 micro-batches, 4 a step: at the end of the second step. Then it has 2 in steps."""
    steps = ["data.batch_size=2", "trainer.accumulate_grad_batches=4", "trainer.val_check_interval=2"]
    whole = train_script.train(configure(*steps, folder="whole"))
    with interrupted():
        train_script.train(configure(*steps, folder="half"))
    settings = tmp_path / "half" / "config.yaml"
    text = settings.read_text()
    assert "\nconfig_version: 2\n" in text and "val_check_interval: 2\n" in text
    old = text.replace("config_version: 2\n", "").replace("val_check_interval: 2\n", "val_check_interval: 5\n")
    settings.write_text(old)
    last = torch.load(tmp_path / "half" / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2 and last["lr_schedulers"][0]["last_epoch"] == 2
    assert train_script.train(configure(f"resume={tmp_path / 'half'}", folder="half")) == whole
    assert yaml.safe_load(settings.read_text()) == yaml.safe_load(text)  # which is not converted again
    weights = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
        for name in ("whole", "half")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    steps_of = [[row["step"] for row in rows(tmp_path / name) if row["val/loss"]] for name in ("whole", "half")]
    assert steps_of == [["2", "4", "6", "8"]] * 2


@pytest.mark.parametrize(
    ("accumulate", "until", "longer"),
    [
        (5, ["trainer.max_steps=2"], ["trainer.max_steps=6"]),
        pytest.param(
            1, ["trainer.max_steps=1000", "+trainer.max_epochs=1"], ["+trainer.max_epochs=3"], marks=pytest.mark.slow
        ),
    ],
    ids=["steps", "passes"],
)
def test_a_run_that_ended_with_a_pass_over_its_text_goes_on_as_if_it_had_not_ended(
    tmp_path, text, accumulate, until, longer
):
    """A pass has 12 batches, or 2 optimizer steps of 5 batches; no validation is due at its end."""
    settings = [*TINY, f"data.path={text}", "data.batch_size=16", "callbacks.causality=null", "callbacks.samples=null"]
    settings += [f"trainer.accumulate_grad_batches={accumulate}", "optim.schedule.kind=constant"]
    settings += ["trainer.val_check_interval=7", "trainer.log_every_n_steps=1"]
    whole = [setting for setting in until if setting.split("=")[0] != longer[0].split("=")[0]]
    resumed = [setting.lstrip("+") for setting in longer]
    for arguments in (
        [*settings, *whole, *longer, "hydra.run.dir=whole"],
        [*settings, *until, "hydra.run.dir=run"],
        ["resume=run", *resumed],
    ):
        done = in_process(*arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    expected, found = (
        [(row["step"], row["train/loss"]) for row in rows(tmp_path / name) if row["train/loss"]]
        for name in ("whole", "run")
    )
    assert found == expected and int(found[-1][0]) == (36 if accumulate == 1 else 6)
