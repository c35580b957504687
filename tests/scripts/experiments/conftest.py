"""Fixtures of the tests of sweeps."""

import json

import pytest

from tril.scripts.experiments import run_process


@pytest.fixture
def drawn(monkeypatch):
    """File name -> figure of all pictures. They are not saved, which takes a second each."""
    from matplotlib.figure import Figure

    figures_by_name = {}
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: figures_by_name.__setitem__(path.name, figure))
    return figures_by_name


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a text, and runs that finish at once with a loss of their overrides' length."""
    lines = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(400))
    (tmp_path / "text.txt").write_text(lines, encoding="utf-8")

    def spawn(arguments, log, lock):
        if "optim.lr_scale=1e+30" in arguments:
            log.write_text("error: the loss is nan\n")
            return 2
        summary = {"final_val_loss": float(len(arguments)), "final_val_bpb": 0.5, "seconds": 61.0}
        (log.parent / "summary.json").write_text(json.dumps(summary))
        return 0

    monkeypatch.setattr(run_process, "spawn", spawn)
    return tmp_path


@pytest.fixture
def no_timing(monkeypatch):
    """Seconds of a run without the few timed steps."""

    class Speed:
        def run(self, **counts):
            return 100.0

    monkeypatch.setattr("tril.model.training.run_estimate.measure", lambda *arguments: Speed())
