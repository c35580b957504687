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
from tril.scripts.cli.formats import clock, plural
from tril.scripts.experiments import grid, nuisance, run_process
from tril.scripts.experiments.sweep import Run, read_json

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
        entries = index["runs"]
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
        family = family_of(config, swept)
        folder, earlier = find_folder(config, family)
        folder.mkdir(parents=True, exist_ok=True)
        launches = launches_of(earlier, ((run.seed, run.values) for run in runs))
    entries, trials = [run.entry() for run in runs], []
    for run in {run.arm: run for run in runs}.values() if tune else ():
        trials += nuisance.trial_entries(run.entry(), run.arm, tune)
    every = {name: with_earlier(new, earlier.get(name, [])) for name, new in (("runs", entries), ("trials", trials))}
    settings, choices = grid.plain_settings(config), config.hydra.runtime.choices
    baseline = {key: grid.value_of(settings, key, choices.get(key)) for key in swept}
    index = {"family": family, "swept": swept, "baseline": baseline, "launches": launches}
    write_json(folder / SWEEP, index | ({nuisance.TUNE: tune} if tune else {}) | every)
    nuisance.retry_failed(folder, trials, entries)
    print_plan(folder, runs, trials)

    with read_write(config.hydra), open_dict(config.hydra):  # Hydra composes every job from these
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
        sweep_dir = f"hydra.sweep.dir={quoted(str(folder))}"
        config.hydra.overrides.hydra += [sweep_dir, "hydra.sweep.subdir=."]
        left = [run.folder for run in runs if state_of(folder / run.folder) != "finished"]
        names = left or [run.folder for run in runs[:1]]  # Hydra needs a job, which then finds its run finished
        config.hydra.sweeper.params = None
        config.hydra.overrides.task = [f"+run={','.join(map(quoted, names))}"]
    return folder


def with_earlier(new: list[dict], earlier: list[dict]) -> list[dict]:
    """The entries of a launch, and those of earlier ones that it does not have."""
    planned = {entry["folder"] for entry in new}
    return [*new, *(entry for entry in earlier if entry["folder"] not in planned)]


def plan_runs(config: DictConfig, config_name: str) -> tuple[list[grid.PlannedRun], dict]:
    """The runs of the grid, and sweep.tune ({}: nothing is tuned); raises UserError if a run or setting is invalid."""
    if config.plan:
        raise UserError(f"plan={config.plan} is for a single run, and a grid prints its plan anyway; leave it out")
    if config.resume is not None:
        raise UserError(
            f"resume={config.resume} continues a single run; to continue a sweep, start the same command again"
        )
    for key in ("skip_invalid", "new"):
        if not isinstance(config.sweep[key], bool):
            raise UserError(f"sweep.{key}={config.sweep[key]} must be true or false")
    elsewhere = config.hydra.launcher._target_.rpartition(".")[2] not in LOCAL_LAUNCHERS
    composer = grid.Composer(config, config_name)
    runs, rejected = grid.compose_grid(composer, elsewhere=elsewhere)
    grid.report_rejected(runs, rejected, skip_invalid=config.sweep.skip_invalid)
    tune = grid.plain_settings(config)["sweep"]["tune"]
    if tune is not None:
        with user_errors():
            nuisance.check_tune(tune, grid.swept_keys(runs), [run.seed for run in runs])
        for overrides in (
            nuisance.with_values(runs[0].overrides, x, nuisance.SEED) for x in nuisance.combinations(tune)
        ):
            if isinstance(trial := composer.plan(overrides, elsewhere=elsewhere), grid.Rejected):
                raise UserError(f"sweep.tune: {trial.reason}")
    if not elsewhere:  # a login node prepares no text, and its speed tells nothing about the jobs
        runs, rejected = grid.estimate_runs(runs)
        grid.report_rejected(runs, rejected, skip_invalid=config.sweep.skip_invalid)
    return runs, tune or {}


def print_plan(folder: Path, runs: list[grid.PlannedRun], trials: list[dict]) -> None:
    """Prints the runs of this launch, what is left to train, and how long that takes.

    Args:
        folder: of the sweep.
        runs: of this launch.
        trials: of their variants.
    """
    states = [state_of(folder / run.folder) for run in runs]
    print(f"{grid.grid_table(runs, states)}\n\nfolder  {folder}")
    left = [run.entry() for run, state in zip(runs, states, strict=True) if state != "finished"]
    left_trials = [trial for trial in trials if state_of(folder / trial["folder"]) not in nuisance.ENDED]
    work = f"{len(left)} of {len(runs)} runs" + f" and {plural(len(left_trials), 'trial')}" * bool(left_trials)
    seconds = [entry["estimated_seconds"] for entry in (*left, *left_trials)]
    known = bool(seconds) and None not in seconds
    estimate = f", about {clock(sum(seconds))} of computing, estimated from a few steps of each" if known else ""
    print(f"{work} to train{estimate}\n", flush=True)


def family_of(config: DictConfig, swept: list[str]) -> str:
    """A hash that is equal for all commands that sweep the same keys over the same settings: they share a folder."""
    settings = grid.plain_settings(config)
    base = {key: value for key, value in settings.items() if key not in ("logger", "checkpoint", "sweep", "seed")}
    base |= {nuisance.TUNE: settings["sweep"]["tune"]}
    return sha256(json.dumps([sorted(swept), base], sort_keys=True).encode()).hexdigest()


def launches_of(earlier: dict, runs: Iterable[tuple[int, dict]]) -> list[dict]:
    """One entry for each launch that added seeds or variants: a report tests its comparisons once for each.

    Args:
        earlier: sweep.json before this launch, {} for a new sweep.
        runs: seed and swept values of each run of this launch.
    """
    runs, entries = list(runs), earlier.get("runs", [])
    added = sorted({seed for seed, _ in runs} - {entry["seed"] for entry in entries})
    more_variants = any(values not in [entry["values"] for entry in entries] for _, values in runs)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    launch = {"seeds": added, "date": now, "command": typed()}
    return [*earlier.get("launches", []), *([launch] if added or more_variants else [])]


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
    """A sweep.json with its family, launches, runs and trials."""
    try:
        content = read_json(path)
        lists = {name: list(content[name]) for name in ("launches", "runs", "trials")}
        return {"family": content["family"], **lists}
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
    entry = next(entry for entry in index["runs"] if entry["folder"] == cfg.run)
    try:
        loss = train(sweep, entry, [trial for trial in index["trials"] if trial["values"] == entry["values"]])
    except KeyboardInterrupt:
        print("\ninterrupted; start the same command again to continue", flush=True)
        sys.exit(128 + signal.SIGINT)
    left = time_left(sweep, index["runs"] + index["trials"])
    print(f"{progress(sweep, index['runs'])}{f', about {left} of computing left' if left else ''}", flush=True)
    return loss


def train(sweep: Path, entry: dict, trials: list[dict]) -> float:
    """Trains a run, with the values that the trials of its variant choose.

    Args:
        entry: the run's, in sweep.json.
        trials: entries of the trials of its variant; empty if nothing is tuned.
    """
    folder, name, overrides = sweep / entry["folder"], entry["folder"], entry["overrides"]
    if trials and state_of(folder) != "finished":
        try:
            values = nuisance.tune_variant(sweep, trials)
        except nuisance.TuningFailed as error:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / FAILURE, {"status": 1, "message": str(error)})
            print(f"FAILED  {name}: {error}", flush=True)
            return math.nan
        if values is None:
            return math.nan
        overrides = nuisance.with_values(overrides, values)
        print(f"tuned   {name}: {nuisance.name_of(values)}", flush=True)
    return run_process.train(folder, overrides, name)


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
