"""What `+tune=lr` means for a whole grid: whether its settings fit, which trials are planned and what they cost."""

from collections.abc import Sequence
from pathlib import Path

from tril.model.runs import state_of
from tril.scripts.cli.errors import UserError
from tril.scripts.cli.formats import clock
from tril.scripts.experiments.grid import PlannedRun, swept_keys
from tril.scripts.experiments.tune_settings import RATES, SCALE, TUNE, TuneConfig
from tril.scripts.experiments.tuning import planned_trials, read_chosen, retry_failed


def check_tune(tune: TuneConfig, runs: Sequence[PlannedRun]) -> None:
    """Raises UserError if the grid and the settings of its tuning exclude each other."""
    if both := [key for key in RATES if key in swept_keys(runs)]:
        raise UserError(
            f"{both[0]} is swept, but +tune=lr chooses the learning rate of each variant; leave out one of them"
        )
    if shared := {run.seed for run in runs} & set(tune.seeds):
        problem = f"has seed {min(shared)} of the grid, whose runs would then choose their own learning rate"
        raise UserError(f"tune.seeds={list(tune.seeds)} {problem}; choose other seeds, such as tune.seeds=[1000]")
    for run in runs:
        if run.config.optim.lr_scale != 1:
            remedy = "leave it out, or set tune.multipliers"
            raise UserError(
                f"{SCALE}={run.config.optim.lr_scale:g} has no effect with +tune=lr, which chooses it; {remedy}"
            )


def tune_entry(folder: Path, tune: TuneConfig, entries: Sequence[dict]) -> dict:
    """The entry of sweep.json: the settings, and the trials of every arm.

    Args:
        folder: of the sweep.
        entries: of all its runs.
    """
    arms = {entry["tuning"]: entry for entry in reversed(entries)}  # the first run of each arm
    settings = {"multipliers": list(tune.multipliers), "seeds": list(tune.seeds), "extend": tune.extend}
    trials = [
        trial | {"values": entry["values"], "estimated_seconds": entry["estimated_seconds"]}
        for arm, entry in reversed(arms.items())
        for trial in planned_trials(folder / arm, arm, tune)
    ]
    return settings | {"trials": trials}


class TuningPlan:
    """What is left to tune for the arms of a launch.

    Attributes:
        n_missing: trials to train.
        n_more: trials that may follow if a best multiplier is an end of its range.
        seconds: estimated time of the missing trials; None on another machine.
        labels: for each arm, what its tuning costs, or its multiplier.
    """

    def __init__(self, folder: Path, tune: TuneConfig, runs: Sequence[PlannedRun]):
        self.n_missing, self.n_more, self.labels = 0, 0, {}
        self.seconds: float | None = 0.0
        for run in {run.arm: run for run in reversed(runs)}.values():
            arm = f"{TUNE}/{run.arm}"
            retry_failed(folder / arm)
            if chosen := read_chosen(folder / arm):
                self.labels[run.arm] = f"lr_scale {chosen['lr_scale']:g}"
                continue
            trials = planned_trials(folder / arm, arm, tune)
            missing = sum(state_of(folder / trial["folder"]) != "finished" for trial in trials)
            self.n_missing += missing
            self.n_more += tune.extend * len(tune.seeds)
            seconds = run.sizes["estimated_seconds"] if run.sizes else None
            self.seconds = None if seconds is None or self.seconds is None else self.seconds + missing * seconds
            time = "" if seconds is None else f", {clock(missing * seconds)}"
            self.labels[run.arm] = f"{missing} trials{time}"
