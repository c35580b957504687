"""The csv file of a run, which a resumed run continues, and wandb without an account, which stays on disk."""

import os
import subprocess
import sys

import pytest

from tril.model.training import loggers

LOG_SOMETHING = """
import sys
from tril.model.training.loggers import wandb_logger
logger = wandb_logger(project="tril", save_dir=sys.argv[1])
logger.log_metrics({"loss": 1.0}, step=1)
logger.experiment.finish()
"""


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(("account", "mode"), [(False, "offline"), (True, None)])
def test_wandb_is_offline_without_an_account_only(no_account, monkeypatch, account, mode):
    arguments = []
    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", lambda **options: arguments.append(options))
    monkeypatch.setattr(loggers, "has_wandb_account", lambda: account)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    loggers.wandb_logger(project="tril", save_dir="x")
    loggers.wandb_logger(project="tril", save_dir="x", id="abc")
    assert os.environ.get("WANDB_MODE") == mode
    fixed = {"project": "tril", "save_dir": "x", "resume": "allow"}
    assert arguments == [fixed | {"id": arguments[0]["id"]}, fixed | {"id": "abc"}] and len(arguments[0]["id"]) == 8


@pytest.mark.slow
def test_without_an_account_a_run_stays_on_disk(no_account, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LOG_SOMETHING, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_an_account_of_wandb_login_is_found(no_account, monkeypatch, tmp_path):
    assert not loggers.has_wandb_account()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert loggers.has_wandb_account()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not loggers.has_wandb_account()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert loggers.has_wandb_account()


def test_a_resumed_run_continues_its_csv_file(tmp_path):
    first = loggers.RunLog(tmp_path)
    first.log_metrics({"loss": 3.0}, step=2)
    first.log_metrics({"loss": 2.0, "norm": 7.0}, step=4)
    first.log_metrics({"loss": 1.0}, step=6)
    file = tmp_path / "csv" / "version_0" / "metrics.csv"
    file.write_text(file.read_text() + "9,2")  # killed within a row
    resumed = loggers.RunLog(tmp_path)
    resumed.start_after(4)
    assert file.read_text() == "loss,norm,step\n3.0,,2\n2.0,7.0,4\n"
    resumed.log_metrics({"loss": 1.5}, step=6)
    resumed.log_metrics({"val": 9.0}, step=6)
    assert file.read_text() == "loss,norm,step,val\n3.0,,2,\n2.0,7.0,4,\n1.5,,6,\n,,6,9.0\n"
    assert not list(file.parent.glob(".*"))
    new = loggers.RunLog(tmp_path)
    new.start_after(None)
    assert not file.exists()
    new.log_metrics({"loss": 5.0}, step=1)
    assert file.read_text() == "loss,step\n5.0,1\n"


def test_a_kill_while_a_column_is_added_keeps_the_rows(tmp_path, monkeypatch):
    log = loggers.RunLog(tmp_path)
    log.log_metrics({"loss": 3.0}, step=2)
    before = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()

    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        log.log_metrics({"norm": 1.0}, step=4)
    assert (tmp_path / "csv" / "version_0" / "metrics.csv").read_text() == before
