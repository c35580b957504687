"""Weights & Biases: when its run stays on disk, and which names it has."""

import pytest

from tril.model.training import loggers
from tril.model.training.settings import LoggerConfig, WandbConfig


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
        (logger,) = loggers.make_loggers(config, folder, step=None, sweep=folder.parent)
        options = logger._wandb_init
        assert (options.get("mode"), options["name"], options["group"]) == (mode, "a=1", "2026/sweep")
        ids.append(options["id"])
        (folder / "wandb" / f"offline-run-20261125_120000-{ids[0]}").mkdir(parents=True, exist_ok=True)
    assert ids[0] == ids[1]
