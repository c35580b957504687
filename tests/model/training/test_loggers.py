"""The csv file of a run, which a resumed run continues."""

import os

import pytest

from tril.model.training import loggers


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
