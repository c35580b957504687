"""Resuming a run that has made all its steps changes nothing, and logs of earlier versions are read."""

import json

import pytest
import yaml

from tests.conftest import assert_refused
from tests.runs import TINY, in_process
from tril import train as train_script
from tril.scripts.common import resume
from tril.scripts.common.cli import UserError


@pytest.fixture
def finished(tmp_path, text):
    done = in_process(*TINY, f"data.path={text}", "hydra.run.dir=run", "trainer.max_steps=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path / "run"


def files(folder):
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_refuses_other_settings_and_keeps_its_record(finished, tmp_path):
    before = files(finished)
    for override in (
        "optim.lr=0.5",
        "trainer.max_steps=3",
        "callbacks.samples.temperature=0",
        "~callbacks.samples",
        "+callbacks.mine._target_=lightning.pytorch.callbacks.LearningRateMonitor",
    ):
        done = in_process("resume=run", override, cwd=tmp_path)
        key = override.split("=")[0].lstrip("~+")
        assert_refused(
            done, f"run has finished its 4 steps without {key}", "; raise trainer.max_steps to continue it, or"
        )
        assert files(finished) == before
    done = in_process("resume=run", cwd=tmp_path)
    assert done.returncode == 0 and "run has finished its 4 steps; it is unchanged" in done.stdout
    assert files(finished) == before
    done = in_process("resume=run", "optim.lr=0.5", "trainer.max_steps=6", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary, settings = json.loads((finished / "summary.json").read_text()), (finished / "config.yaml").read_text()
    assert summary["steps"] == 6 and yaml.safe_load(settings)["optim"]["lr"] == 0.5


def test_the_results_are_those_of_the_run(configure, tmp_path):
    first = train_script.train(configure())
    assert train_script.train(configure(f"resume={tmp_path / 'run'}")) == first


@pytest.mark.slow
def test_a_run_that_ended_before_its_summary_writes_it(configure, tmp_path):
    first = train_script.train(configure())
    (tmp_path / "run" / "summary.json").unlink()  # the process ended between the checkpoint and the summary
    assert train_script.train(configure(f"resume={tmp_path / 'run'}")) == pytest.approx(first, rel=1e-6)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 8


OLD = "tril.model.training.loggers"
WANDB = {"project": "mine", "save_dir": "x", "name": None, "id": "abc"}


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (None, {}),
        ({"_target_": f"{OLD}.RunLog", "save_dir": "x", "name": "csv"}, {}),
        ({"_target_": f"{OLD}.no_logger"}, {}),
        ({"_target_": "model.training.loggers.no_logger"}, {}),
        ({"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "/old"}, {}),
        ({"_target_": f"{OLD}.wandb_logger", **WANDB}, {"wandb": {"_target_": f"{OLD}.wandb_logger", **WANDB}}),
        (
            {"_target_": "lightning.pytorch.loggers.MLFlowLogger"},
            {"saved": {"_target_": "lightning.pytorch.loggers.MLFlowLogger"}},
        ),
        ({"wandb": WANDB}, {"wandb": WANDB}),
    ],
)
def test_the_single_logger_of_older_versions_gets_a_name(configure, saved, expected):
    assert resume._of_this_version({"output_dir": "elsewhere", "logger": saved}, configure())["logger"] == expected


@pytest.mark.slow
def test_a_run_with_wandb_of_an_older_version_goes_on_with_its_identity(configure, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")  # wandb reads it once per process, and test_trackers.py needs it
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_script.train(configure())
    settings = tmp_path / "run" / "config.yaml"
    old = {"_target_": f"{OLD}.wandb_logger", **WANDB, "save_dir": str(tmp_path / "run"), "group": None, "tags": None}
    settings.write_text(yaml.safe_dump(yaml.safe_load(settings.read_text()) | {"logger": old}))
    cfg = configure(f"resume={tmp_path / 'run'}")
    monkeypatch.setattr(resume, "task_overrides", lambda: ["trainer.max_steps=10"])
    monkeypatch.setattr("tril.scripts.common.resume_checks.task_overrides", lambda: ["trainer.max_steps=10"])
    cfg.trainer.max_steps = 10
    train_script.train(cfg)
    assert yaml.safe_load(settings.read_text())["logger"]["wandb"]["id"] == "abc"


def test_a_setting_that_is_no_logger_is_refused(configure, tmp_path):
    with pytest.raises(UserError, match="logger.project=x must be a logger with a _target_, or null; correct it"):
        train_script.train(configure("+logger.project=x"))
