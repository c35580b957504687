"""Fixtures of the tests of sweeps."""

import pytest

from tests.scripts.experiments.synthetic import Processes
from tril.scripts.experiments import launch


@pytest.fixture
def drawn(monkeypatch):
    """File name -> figure of all pictures. They are not saved, which takes a second each."""
    figures = {}

    def keep(path, figure, dpi):
        figures[path.name] = figure
        path.write_bytes(b"")

    monkeypatch.setattr("tril.scripts.experiments.plots.write_picture", keep)
    return figures


@pytest.fixture
def processes(monkeypatch):
    """A function: sets what the runs leave, see `Processes`, which it returns."""

    def start(outcome):
        monkeypatch.setattr(launch, "spawn", stand_in := Processes(outcome))
        return stand_in

    return start


@pytest.fixture
def here(text, monkeypatch):
    """A folder with text.txt. The pictures of its reports, which take seconds, are not drawn."""
    monkeypatch.setattr("tril.scripts.experiments.report.draw", lambda *_: {})
    return text.parent
