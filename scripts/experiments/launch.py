"""What `train.py -m` does around its runs: checks the whole grid before the first run, reports after the last one.

The same command finds its folder again and continues there; so does a command with more seeds or more values.
"""

import json
import math
import shlex
import signal
import sys
import traceback
from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from tril.model.atomic_files import write_json
from tril.model.runs import FAILURE, ROOTS, SWEEP, new_folder, state_of
from tril.scripts.cli.command_line import quoted
from tril.scripts.cli.errors import UserError, command, fail, user_errors
from tril.scripts.cli.formats import clock
from tril.scripts.experiments import grid, run_process
from tril.scripts.experiments.sweep import Run, read_json
from tril.scripts.experiments.tune_plan import TuningPlan, check_tune, tune_entry
from tril.scripts.experiments.tune_settings import TUNE, TuneConfig, read_tune, scale_override, without_tune
from tril.scripts.experiments.tuning import TuningFailed, tune_arm

LOCAL_LAUNCHERS = ("BasicLauncher", "JoblibLauncher", "LocalLauncher")  # their jobs run on this machine


class Sweep(Callback):
    """Hydra's callback around a multirun. It ends the process on errors, which Hydra would turn into warnings."""

    def __init__(self) -> None:
        self.folder = Path()

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        try:
            sweeper = config.hydra.sweeper._target_.rpartition(".")[2]
            if sweeper != BasicSweeper.__name__:
                raise UserError(f"hydra/sweeper={sweeper} is not supported: a sweep is a grid; see docs/ablations.md")
            self.folder = prepare_sweep(config, kwargs["config_name"])
        except UserError as error:
            fail(error)
        except Exception:
            traceback.print_exc()
            sys.exit(1)

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        index = read_json(self.folder / SWEEP)
        entries = index["cells"]
        if tune := read_tune(config):  # a range that was extended has more trials than planned
            write_json(self.folder / SWEEP, index | {TUNE: tune_entry(self.folder, tune, entries)})
        states = {entry["folder"]: state_of(self.folder / entry["folder"]) for entry in entries}
        missing = [f"{folder} ({state})" for folder, state in states.items() if state != "finished"]
        finished = f"{len(entries) - len(missing)} of {len(entries)} runs are finished"
        print(f"\n{finished}; {command('report')} dir={self.folder}", flush=True)
        if missing:
            print(f"NOT finished: {'; '.join(missing)}; start the same command again to continue", flush=True)
            sys.exit(1)


def prepare_sweep(config: DictConfig, config_name: str) -> Path:
    """Checks and lists the runs, writes sweep.json, and gives Hydra's jobs the folder of the sweep and their runs.

    Returns:
        The sweep's folder.

    Raises:
        UserError: a run is invalid.
    """
    runs, tune = plan_runs(config, config_name)
    swept = grid.name_runs(runs)
    with user_errors():
        family = family_of(config, swept, tune)
        folder, earlier = find_folder(config, family)
        folder.mkdir(parents=True, exist_ok=True)
        stages = stages_of(earlier, ((run.seed, run.values) for run in runs))
    entries = [run.entry() | ({"tuning": f"{TUNE}/{run.arm}"} if tune else {}) for run in runs]
    planned = {run.folder for run in runs}
    entries += [entry for entry in earlier.get("cells", []) if entry["folder"] not in planned]
    settings, choices = grid.plain_settings(config), config.hydra.runtime.choices
    baseline = {key: grid.value_of(settings, key, choices.get(key)) for key in swept}
    # "cells": the name of the runs since the first version of the file
    index = {"family": family, "command": typed(), "swept": swept, "baseline": baseline, "stages": stages}
    index |= {TUNE: tune_entry(folder, tune, entries)} if tune else {}
    write_json(folder / SWEEP, index | {"cells": entries})
    tuning = TuningPlan(folder, tune, runs) if tune else None
    print_plan(folder, runs, tuning)

    with read_write(config.hydra), open_dict(config.hydra):  # Hydra composes every job from these
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
        sweep_dir = f"hydra.sweep.dir={quoted(str(folder))}"
        config.hydra.overrides.hydra += [sweep_dir, "hydra.sweep.subdir=."]
        left = [run.folder for run in runs if state_of(folder / run.folder) != "finished"]
        names = left or [run.folder for run in runs[:1]]  # Hydra needs a job, which then finds its run finished
        config.hydra.sweeper.params = None
        config.hydra.overrides.task = [f"+run={','.join(map(quoted, names))}"]
    return folder


def plan_runs(config: DictConfig, config_name: str) -> tuple[list[grid.PlannedRun], TuneConfig | None]:
    """The runs of the grid, and the settings of its tuning; raises UserError if a run or a setting is invalid."""
    if config.plan:
        raise UserError(f"plan={config.plan} is for a single run, and a grid prints its plan anyway; leave it out")
    if config.resume is not None:
        raise UserError(
            f"resume={config.resume} continues a single run; to continue a sweep, start the same command again"
        )
    for key in ("skip_invalid", "new"):
        if not isinstance(config.sweep[key], bool):
            raise UserError(f"sweep.{key}={config.sweep[key]} must be true or false")
    tune = read_tune(config)
    elsewhere = config.hydra.launcher._target_.rpartition(".")[2] not in LOCAL_LAUNCHERS
    runs, rejected = grid.compose_grid(config, config_name, elsewhere=elsewhere)
    grid.report_rejected(runs, rejected, skip_invalid=config.sweep.skip_invalid)
    if tune:
        check_tune(tune, runs)
    if not elsewhere:  # a login node prepares no text, and its speed tells nothing about the jobs
        runs, rejected = grid.estimate_runs(runs)
        grid.report_rejected(runs, rejected, skip_invalid=config.sweep.skip_invalid)
    return runs, tune


def print_plan(folder: Path, runs: list[grid.PlannedRun], tuning: TuningPlan | None) -> None:
    """Prints the runs of this launch, what is left to train, and how long that takes.

    Args:
        folder: of the sweep.
        runs: of this launch.
        tuning: of the learning rates; None without +tune=lr.
    """
    states = [state_of(folder / run.folder) for run in runs]
    to_run = [run for run, state in zip(runs, states, strict=True) if state != "finished"]
    print(f"{grid.grid_table(runs, states, tuning.labels if tuning else None)}\n\nfolder  {folder}")
    work = f"{len(to_run)} of {len(runs)} runs"
    seconds = sum(run.sizes["estimated_seconds"] for run in to_run) if all(run.sizes for run in to_run) else None
    if tuning and tuning.n_missing:
        more = f" (at most {tuning.n_more} more, if a best multiplier is an end of the range)" if tuning.n_more else ""
        work += f" and {tuning.n_missing} trials of learning rates{more}"
        seconds = None if seconds is None or tuning.seconds is None else seconds + tuning.seconds
    estimate = f", about {clock(seconds)} of computing, estimated from a few steps of each" if seconds else ""
    print(f"{work} to train{estimate}")
    print(flush=True)


def family_of(config: DictConfig, swept: list[str], tune: TuneConfig | None = None) -> str:
    """A hash that is equal for all commands that sweep the same keys over the same settings: they share a folder."""
    settings = grid.plain_settings(config)
    base = {key: value for key, value in settings.items() if key not in ("logger", "checkpoint", "sweep", "seed")}
    base |= {TUNE: vars(tune)} if tune else {}
    return sha256(json.dumps([sorted(swept), base], sort_keys=True).encode()).hexdigest()


def stages_of(earlier: dict, runs: Iterable[tuple[int, dict]]) -> list[dict]:
    """One entry for each launch that added seeds or variants: a report tests its comparisons once for each.

    Args:
        earlier: sweep.json before this launch, {} for a new sweep. One of an older version has no stages; its seeds are
            the first.
        runs: seed and swept values of each run of this launch.
    """
    runs, cells = list(runs), earlier.get("cells", [])
    known = {entry["seed"] for entry in cells}
    first = [{"seeds": sorted(known), "date": None, "command": None}] if known else []
    stages = earlier.get("stages", first)
    added = sorted({seed for seed, _ in runs} - known)
    more_variants = any(values not in [entry.get("values", {}) for entry in cells] for _, values in runs)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    launch = {"seeds": added, "date": now, "command": typed()}
    return [*stages, *([launch] if added or more_variants else [])]


def typed() -> str:
    """The command line, quoted so that a shell reads it as typed."""
    return f"{command('train')} {shlex.join(sys.argv[1:])}"


def find_folder(config: DictConfig, family: str) -> tuple[Path, dict]:
    """The folder of the sweep, and its sweep.json; {} for a new one.

    Raises:
        ValueError: the chosen folder belongs to another sweep.
    """
    if any(override.startswith("hydra.sweep.dir=") for override in config.hydra.overrides.hydra):
        folder = Path(config.hydra.sweep.dir)
        if not (folder / SWEEP).is_file():
            return folder, {}
        earlier = read_index(folder / SWEEP)
        if earlier["family"] != family:
            raise ValueError(f"hydra.sweep.dir={folder} holds a sweep of other keys or settings; choose another folder")
        return folder, earlier
    if not config.sweep.new:
        known = Path(ROOTS[1]).glob(f"*/*/{SWEEP}")
        for path in sorted(known, key=lambda path: path.stat().st_mtime, reverse=True):
            if (earlier := read_index(path))["family"] == family:
                return path.parent, earlier
    return new_folder(ROOTS[1]), {}


def read_index(path: Path) -> dict:
    """A sweep.json with its family, its runs, and its stages if it has them."""
    try:
        content = read_json(path)
        index = {"family": content["family"], "cells": list(content["cells"])}
        return index | {"stages": list(content["stages"])} if "stages" in content else index
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of runs ({error}); restore it, or move its folder away") from error


def run_job(cfg: DictConfig) -> float:
    """A job of `train.py -m`: trains the run `cfg.run` of the sweep, after the trials of its variant if it is tuned.

    Every launcher (Hydra's own loop, joblib, Slurm) calls it once for each run. The run composes its settings in a
    process of its own.

    Returns:
        Its validation loss; NaN if it failed or was stopped.
    """
    sweep = Path(HydraConfig.get().sweep.dir)
    index = read_json(sweep / SWEEP)
    entry = next(entry for entry in index["cells"] if entry["folder"] == cfg.run)
    try:
        if TUNE in index:
            loss = train_tuned(sweep, entry, index[TUNE])
        else:
            loss = run_process.train(sweep / entry["folder"], entry["overrides"], entry["folder"])
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
    return run_process.train(folder, [*without_tune(overrides), scale_override(multiplier)], entry["folder"])


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
            actual += Run(sweep / entry["folder"], 0).summary["seconds"]
        else:
            left += seconds
    return clock(left * actual / estimated) if left and estimated else None
