"""A job of `train.py -m`: one run of the sweep, after the trials of its learning rate if the sweep has `+tune=lr`.

Every launcher (Hydra's own loop, joblib, Slurm) calls `run_job` once for each run.
"""

import math
import signal
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from tril.model.atomic_files import write_json
from tril.model.runs import FAILURE, SWEEP, state_of
from tril.scripts.ablation.run_process import train
from tril.scripts.ablation.sweep_files import TUNE, read_json, read_summary
from tril.scripts.cli.formats import clock


def run_job(cfg: DictConfig) -> float:
    """Trains the run of this Hydra job unless it is finished.

    Args:
        cfg: composed by Hydra, and not read: the run composes its settings in a process of its own.

    Returns:
        Its validation loss; NaN if it failed, was stopped or is left out.
    """
    settings = HydraConfig.get()
    sweep, overrides = Path(settings.sweep.dir), list(settings.overrides.task)
    index = read_json(sweep / SWEEP)
    entry = next((entry for entry in index["cells"] if entry["overrides"] == overrides), None)
    if entry is None:  # an invalid run that sweep.skip_invalid left out
        return math.nan
    folder = sweep / entry["folder"]
    if state_of(folder) == "finished":
        return read_summary(folder)["final_val_loss"]
    try:
        loss = train_tuned(sweep, entry, index[TUNE]) if TUNE in index else train(folder, overrides, entry["folder"])
    except KeyboardInterrupt:
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(128 + signal.SIGINT)
    left = time_left(sweep, index["cells"] + index.get(TUNE, {}).get("trials", []))
    print(f"{progress(sweep, index['cells'])}{f', about {left} of computing left' if left else ''}", flush=True)
    return loss


def train_tuned(sweep: Path, entry: dict, tune: dict) -> float:
    """Trains a run with the multiplier of its arm, after the arm's trials.

    Args:
        entry: the run's, in sweep.json.
        tune: the settings, in sweep.json.
    """
    from tril.scripts.ablation.tune_settings import TuneConfig, scale_override, without_tune
    from tril.scripts.ablation.tuning import TuningFailed, tune_arm

    config = TuneConfig(**{name: tune[name] for name in TuneConfig.__dataclass_fields__})
    folder, overrides = sweep / entry["folder"], entry["overrides"]
    try:
        multiplier = tune_arm(sweep, entry["tuning"], overrides, config)
    except TuningFailed as error:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FAILURE, {"status": 1, "message": str(error)})
        print(f"FAILED  {entry['folder']}: {error}", flush=True)
        return math.nan
    if multiplier is None:
        return math.nan
    return train(folder, [*without_tune(overrides), scale_override(multiplier)], entry["folder"])


def progress(sweep: Path, entries: list[dict]) -> str:
    """How many runs of the sweep are finished and failed."""
    states = [state_of(sweep / entry["folder"]) for entry in entries]
    failed = f", {states.count('failed')} failed" if "failed" in states else ""
    return f"        {states.count('finished')} of {len(entries)} runs are finished{failed}"


def time_left(sweep: Path, entries: list[dict]) -> str | None:
    """Estimated time of the unfinished runs, scaled by actual / estimated time of the finished ones."""
    estimated, actual, left = 0.0, 0.0, 0.0
    for entry in entries:
        seconds = entry["estimated_seconds"]
        if seconds is None:
            return None
        if state_of(sweep / entry["folder"]) == "finished":
            estimated += seconds
            actual += read_summary(sweep / entry["folder"])["seconds"]
        else:
            left += seconds
    return clock(left * actual / estimated) if left and estimated else None
