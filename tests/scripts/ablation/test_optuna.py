"""`hydra/sweeper=optuna`: the search of an existing plugin, on runs whose loss is a known function."""

import json
import math

import pytest
import yaml

from tests.scripts.ablation.commands import sweep
from tril.scripts.ablation import run_process

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
pytestmark = pytest.mark.filterwarnings("ignore:Deprecated API features detected")  # of SQLAlchemy 1.4
BEST = 1.5
SEARCH = (
    "hydra/sweeper=optuna",
    "optim.lr_scale=tag(log,interval(0.25,4))",
    "hydra.sweeper.sampler.seed=1",
    "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.study_name=search",
    "hydra.sweeper.storage=sqlite:///study.db",
)


@pytest.fixture
def tried(here, monkeypatch):
    """Multipliers in the order of the search; runs above 3 fail, and the others have their minimum at BEST."""
    multipliers = []

    def spawn(arguments, log, lock):
        settings = dict(text.partition("=")[::2] for text in arguments)
        multipliers.append(scale := float(settings["optim.lr_scale"]))
        if scale > 3:
            log.write_text("out of memory\n")
            return 1
        summary = {"final_val_loss": 3 + math.log2(scale / BEST) ** 2, "final_val_bpb": 1.0, "seconds": 1.0}
        (log.parent / "summary.json").write_text(json.dumps(summary))
        return 0

    monkeypatch.setattr(run_process, "spawn", spawn)
    return multipliers


@pytest.mark.slow
def test_search_finds_the_minimum_survives_failures_and_continues(here, tried):
    done = sweep(here, *SEARCH, "hydra.sweeper.n_trials=14")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(tried) == 14 and max(tried) > 3 and "FAILED  " in done.stdout
    [path] = here.glob("multirun/*/*/optimization_results.yaml")
    found = yaml.safe_load(path.read_text())
    best = min((scale for scale in tried if scale <= 3), key=lambda scale: abs(math.log(scale / BEST)))
    assert found["best_params"] == {"optim.lr_scale": pytest.approx(best)}
    assert f"best    {found['best_value']:.4f}: optim.lr_scale={best}; multirun" in done.stdout

    again = sweep(here, *SEARCH, "hydra.sweeper.n_trials=2")
    assert again.returncode == 0 and len(tried) == 16 and (here / "study.db").is_file()
    # the storage knows the earlier results: the new best is the best of all 16
    best = min((scale for scale in tried if scale <= 3), key=lambda scale: abs(math.log(scale / BEST)))
    assert f": optim.lr_scale={best}; multirun" in again.stdout


def test_stopped_run_ends_the_search_without_a_result(here, tried, monkeypatch):
    monkeypatch.setattr(run_process, "spawn", lambda arguments, log, lock: 143)
    done = sweep(here, *SEARCH[:-2], "hydra.sweeper.n_trials=3")
    assert done.returncode == 143 and done.stdout.count("start   ") == 1
