"""wandb without an account stays on disk, TensorBoard is optional, and an error of either does not end a run."""

import json
import logging
import sys

import pytest
from lightning.pytorch.loggers import CSVLogger

from tril.model.training import trackers
from tril.model.training.trackers import WandbLog, guarded


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("account", "chosen", "mode"), [(False, None, "offline"), (True, None, None), (False, "x", None)]
)
def test_wandb_is_offline_without_an_account_only(no_account, monkeypatch, account, chosen, mode):
    monkeypatch.setattr(trackers, "has_wandb_account", lambda: account)
    if chosen:
        monkeypatch.setenv("WANDB_MODE", chosen)
    new, known = WandbLog(project="tril", save_dir="x"), WandbLog(project="tril", save_dir="x", id="abc", group="g")
    expected = {"name": None, "project": "tril", "dir": "x", "resume": "allow"} | ({"mode": mode} if mode else {})
    assert new._wandb_init == expected | {"id": new.version} and len(new.version) == 8
    assert known._wandb_init == expected | {"id": "abc", "group": "g"}


def test_an_account_of_wandb_login_is_found(no_account, monkeypatch, tmp_path):
    assert not trackers.has_wandb_account()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password key\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert trackers.has_wandb_account()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not trackers.has_wandb_account()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert trackers.has_wandb_account()


def test_log_model_is_a_boolean():
    with pytest.raises(ValueError, match="logger.wandb.log_model=all must be true or false"):
        WandbLog(log_model="all")


def test_a_missing_package_is_named_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ValueError, match=r'logger=tensorboard needs a package; pip install "tril\[tensorboard\]"'):
        trackers.TensorBoardLog(tmp_path)


def test_the_table_of_samples_is_bounded(monkeypatch):
    logger, tables = WandbLog(id="x"), []
    monkeypatch.setattr(logger, "log_table", lambda key, columns, data, step: tables.append(data))
    for step in range(205):
        logger.log_sample("p", f"text {step}", step)
    assert tables[1] == [[0, "p", "text 0"], [1, "p", "text 1"]]
    assert [len(data) for data in tables[98:102]] == [99, 100, 100, 100]
    assert tables[-1][0] == [105, "p", "text 105"] and tables[-1][-1] == [204, "p", "text 204"]


class Failing(CSVLogger):
    calls = 0

    def log_metrics(self, metrics, step=None):
        Failing.calls += 1
        if step == 2:
            raise ConnectionError("no\nnetwork")

    def save(self):
        Failing.calls += 1


def test_the_first_error_of_a_tracker_is_a_warning_and_its_last_call(tmp_path, caplog):
    logger = guarded(Failing(tmp_path))
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            logger.log_metrics({"loss": 1.0}, step=step)
            logger.save()
    assert Failing.calls == 5  # steps 0, 1 with a save each, and 2
    line = "Failing failed (ConnectionError: no network) and is not used from here on; metrics.csv is complete"
    assert [record.getMessage() for record in caplog.records] == [line]


def test_a_signal_passes_a_tracker(tmp_path, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Failing, "log_metrics", stopped)
    with pytest.raises(KeyboardInterrupt):
        guarded(Failing(tmp_path)).log_metrics({})


def test_the_run_at_wandb_ends_even_if_its_results_cannot_be_added(tmp_path):
    class Run:
        exit_code = None

        def log(self, values):
            raise ConnectionError("no network")

        def finish(self, exit_code):
            self.exit_code = exit_code

    logger, run = WandbLog(id="x"), Run()
    logger._experiment = run
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 3}))
    with pytest.raises((ConnectionError, FileNotFoundError)):
        logger.finish(tmp_path, "{}", failed=True)
    assert run.exit_code == 1
