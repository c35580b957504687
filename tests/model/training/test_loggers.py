"""The csv file of a run, which a resumed run continues."""

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
    assert file.read_text().replace("\r", "") == "loss,norm,step,val\n3.0,,2,\n2.0,7.0,4,\n1.5,,6,\n,,6,9.0\n"
    assert not list(file.parent.glob(".*"))
    new = loggers.RunLog(tmp_path)
    new.log_metrics({"loss": 5.0}, step=1)
    assert file.read_text() == "loss,step\n5.0,1\n"


@pytest.mark.parametrize(
    ("account", "chosen", "mode"), [(False, None, "offline"), (True, None, None), (False, "x", None)]
)
def test_wandb_is_offline_without_an_account_only_and_a_resumed_run_keeps_its_id(
    monkeypatch, tmp_path, account, chosen, mode
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr("wandb.login", lambda prompt: account)
    if chosen:
        monkeypatch.setenv("WANDB_MODE", chosen)
    config, folder = LoggerConfig(wandb=WandbConfig()), tmp_path / "2026" / "sweep" / "a=1"
    ids = []
    for _ in range(2):
        _, logger = loggers.make_loggers(config, folder, step=None, sweep=folder.parent)
        options = logger._wandb_init
        assert (options.get("mode"), options["name"], options["group"]) == (mode, "a=1", "2026/sweep")
        ids.append(options["id"])
        (folder / "wandb" / f"offline-run-20261125_120000-{ids[0]}").mkdir(parents=True, exist_ok=True)
    assert ids[0] == ids[1]
