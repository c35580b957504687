"""The csv file of a run, which a resumed run continues."""

import os

import pytest

from tril.model.training import loggers
from tril.model.training.settings import LoggerConfig, WandbConfig


def test_a_resumed_run_continues_its_csv_file(tmp_path):
    first = loggers.RunLog(tmp_path)
    first.log_metrics({"loss": 3.0}, step=2)
    first.log_metrics({"loss": 2.0, "norm": 7.0}, step=4)
    first.log_metrics({"loss": 1.0}, step=6)
    file = tmp_path / "csv" / "version_0" / "metrics.csv"
    file.write_text(file.read_text() + "9,2")  # killed within a row
    resumed = loggers.RunLog(tmp_path, step=4)
    resumed.log_metrics({"loss": 1.5}, step=6)
    resumed.log_metrics({"val": 9.0}, step=6)
    assert file.read_text() == "loss,norm,step,val\n3.0,,2,\n2.0,7.0,4,\n1.5,,6,\n,,6,9.0\n"
    assert not list(file.parent.glob(".*"))
    new = loggers.RunLog(tmp_path)
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


@pytest.mark.parametrize(
    ("account", "chosen", "mode"), [(False, None, "offline"), (True, None, None), (False, "x", None)]
)
def test_wandb_is_offline_without_an_account_only(monkeypatch, tmp_path, account, chosen, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(loggers, "has_wandb_account", lambda: account)
    if chosen:
        monkeypatch.setenv("WANDB_MODE", chosen)
    config = loggers.with_identity(LoggerConfig(wandb=WandbConfig(tags=("a",))), tmp_path / "run")
    _, logger = loggers.make_loggers(config, tmp_path / "run", None)
    assert logger._wandb_init.get("mode") == mode
    assert (logger._wandb_init["id"], logger._wandb_init["name"]) == (config.wandb.id, "run")
    assert loggers.with_identity(config, tmp_path / "other") == config, "a resumed run keeps its identity"


def test_an_account_of_wandb_login_is_found(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not loggers.has_wandb_account()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert loggers.has_wandb_account()
