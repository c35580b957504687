"""wandb without an account: the run stays on disk, and nothing prompts."""

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
    assert os.environ.get("WANDB_MODE") == mode and arguments == [{"project": "tril", "save_dir": "x"}]


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
