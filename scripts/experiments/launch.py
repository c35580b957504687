"""What `train.py -m` does around its runs: checks the whole grid before the first run, compares after the last one.

The same command finds its folder again and continues there; so does a command with more seeds or more values.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from tril.model.atomic_files import write_json
from tril.model.formats import clock
from tril.model.runs import ROOTS, SWEEP, new_folder, state_of
from tril.scripts.cli.app import plain_settings, quoted
from tril.scripts.cli.errors import UserError, fail, shell_command, user_errors
from tril.scripts.experiments import grid, run_process
from tril.scripts.experiments.sweep import Run, read_json

LISTS = ("launches", "runs")  # of sweep.json


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
        entries = read_json(self.folder / SWEEP)["runs"]
        states = {entry["folder"]: state_of(self.folder / entry["folder"]) for entry in entries}
        missing = [f"{folder} ({state})" for folder, state in states.items() if state != "finished"]
        print(f"\n{compared(self.folder)}\n", flush=True)
        finished = f"{len(entries) - len(missing)} of {len(entries)} runs are finished"
        print(f"{finished}; {shell_command('report', f'dir={self.folder}')}", flush=True)
        if missing:
            print(f"NOT finished: {'; '.join(missing)}; start the same command again to continue", flush=True)
            sys.exit(1)


def compared(folder: Path) -> str:
    """The comparison of a sweep, for the terminal."""
    from tril.scripts.experiments.report import read_report

    try:
        return read_report(folder).shown()
    except ValueError as error:  # runs that cannot be compared, or a damaged file
        return f"no comparison: {error}"


def prepare_sweep(config: DictConfig, config_name: str) -> Path:
    """Checks and lists the runs, writes sweep.json, and gives Hydra's jobs the folder of the sweep and their runs.

    Returns:
        The sweep's folder.

    Raises:
        UserError: a run is invalid.
    """
    runs, swept = plan_runs(config, config_name)
    settings, choices = plain_settings(config), config.hydra.runtime.choices
    chosen = any(override.startswith("hydra.sweep.dir=") for override in config.hydra.overrides.hydra)
    with user_errors():
        folder, index = known_sweep(config.hydra.sweep.dir if chosen else None, swept, settings)
        index["baseline"] = {key: grid.value_of(settings, key, choices.get(key)) for key in swept}
        folder, _ = record_launch(folder, index, runs)
    print_plan(folder, runs)

    with read_write(config.hydra), open_dict(config.hydra):  # Hydra composes every job from these
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
        config.hydra.overrides.hydra += [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.sweep.subdir=."]
        left = [run.folder for run in runs if state_of(folder / run.folder) != "finished"]
        names = left or [run.folder for run in runs[:1]]  # Hydra needs a job, which then finds its run finished
        config.hydra.sweeper.params = None
        config.hydra.overrides.task = [f"+run={','.join(map(quoted, names))}"]
    return folder


def plan_runs(config: DictConfig, config_name: str) -> tuple[list[grid.PlannedRun], list[str]]:
    """The runs of the grid and the swept keys.

    Raises:
        UserError: a run or setting is invalid.
    """
    if config.resume is not None:
        raise UserError(
            f"resume={config.resume} continues a single run; to continue a sweep, start the same command again"
        )
    if config.minutes is not None:
        raise UserError(f"minutes={config.minutes} depend on the machine, so runs would differ; set trainer.max_steps")
    if not isinstance(skip_invalid := config.sweep.skip_invalid, bool):
        raise UserError(f"sweep.skip_invalid={skip_invalid} must be true or false")
    runs, rejected = grid.compose_grid(grid.Composer(config, config_name))
    grid.report_rejected(runs, rejected, skip_invalid=skip_invalid)
    swept = grid.name_runs(runs)
    runs, rejected = grid.fit_to_text(runs)
    grid.report_rejected(runs, rejected, skip_invalid=skip_invalid)
    return runs, swept


def print_plan(folder: Path, runs: list[grid.PlannedRun]) -> None:
    """Prints the runs of this launch, and how many are left to train.

    Args:
        folder: of the sweep.
        runs: of this launch.
    """
    states = [state_of(folder / run.folder) for run in runs]
    print(f"{grid.grid_table(runs, states)}\n\nfolder  {folder}")
    print(f"{len(runs) - states.count('finished')} of {len(runs)} runs to train\n", flush=True)


def known_sweep(
    chosen: str | None, swept: Sequence[str], settings: dict[str, Any]
) -> tuple[Path | None, dict[str, Any]]:
    """The folder of a sweep. All commands that sweep the same keys over the same settings share one.

    Args:
        chosen: a folder that the user names; None: one below multirun/.
        settings: of a run; those of the swept keys are the same for all values, such as the defaults.

    Returns:
        The folder, None if it is new and not chosen, and the content of its sweep.json.

    Raises:
        ValueError: the chosen folder belongs to another sweep, or a sweep.json is damaged.
    """
    base = {key: value for key, value in settings.items() if key not in ("logger", "checkpoint", "sweep", "seed")}
    family = sha256(json.dumps([sorted(swept), base], sort_keys=True).encode()).hexdigest()
    index = {"family": family, "swept": list(swept), **{name: [] for name in LISTS}}
    if chosen is not None:
        known = [path for path in [Path(chosen, SWEEP)] if path.is_file()]
    else:
        known = sorted(Path(ROOTS[1]).glob(f"*/*/{SWEEP}"), key=lambda path: -path.stat().st_mtime)
    for path in known:
        if (earlier := read_index(path))["family"] == family:
            return path.parent, index | {name: earlier[name] for name in LISTS}
        if chosen is not None:
            raise ValueError(f"{chosen} holds a sweep of other keys or settings; choose another folder")
    return None if chosen is None else Path(chosen), index


def read_index(path: Path) -> dict:
    """A sweep.json with its family, launches and runs."""
    try:
        content = read_json(path)
        lists = {name: list(content[name]) for name in LISTS}
        return {"family": content["family"], **lists}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of runs ({error}); restore it, or move its folder away") from error


def record_launch(
    folder: Path | None, index: dict, runs: Sequence[grid.PlannedRun], script: str = "train"
) -> tuple[Path, dict]:
    """Writes the sweep.json of a launch.

    Args:
        folder: of the sweep; None: a new one.
        index: the content of sweep.json before.
        script: that the user has started.

    Returns:
        The folder, and the content of its sweep.json.
    """
    folder = folder or new_folder(ROOTS[1])
    folder.mkdir(parents=True, exist_ok=True)
    index = with_launch(index, [run.entry() for run in runs], script)
    write_json(folder / SWEEP, index)
    return folder, index


def with_launch(index: dict, runs: Sequence[dict], script: str = "train") -> dict:
    """The content of sweep.json with the runs of a launch.

    A launch that adds runs is an entry of its own: a report tests its comparisons once for each.
    """
    planned = {run["folder"] for run in runs}
    seeds = sorted({run["seed"] for run in runs} - {run["seed"] for run in index["runs"]})
    is_new = bool(planned - {run["folder"] for run in index["runs"]})
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    launch = {"seeds": seeds, "date": now, "command": shell_command(script, *sys.argv[1:])}
    merged = [*runs, *(run for run in index["runs"] if run["folder"] not in planned)]
    return index | {"runs": merged, "launches": [*index["launches"], *[launch] * is_new]}


def train_all(folder: Path, runs: Sequence[grid.PlannedRun]) -> None:
    """Trains the runs of a sweep, one after another; raises ValueError if one does not finish."""
    for run in runs:
        run_process.train(folder / run.folder, run.overrides, run.folder)
        if (state := state_of(folder / run.folder)) != "finished":
            remedy = Run(folder / run.folder, run.seed).message or "start the same command again to continue"
            raise ValueError(f"{folder / run.folder} is {state}: {remedy}")


def run_job(cfg: DictConfig) -> float:
    """A job of `train.py -m`: trains the run `cfg.run` of the sweep.

    Every launcher (Hydra's own loop, joblib, Slurm) calls it once for each run. The run composes its settings in a
    process of its own.

    Returns:
        Its validation loss; NaN if it failed or was stopped.
    """
    sweep = Path(HydraConfig.get().sweep.dir)
    index = read_json(sweep / SWEEP)
    entry = next(entry for entry in index["runs"] if entry["folder"] == cfg.run)
    loss = run_process.train(sweep / entry["folder"], entry["overrides"], entry["folder"])
    print(progress(sweep, index), flush=True)
    return loss


def progress(sweep: Path, index: dict) -> str:
    """How many runs of the sweep are finished and failed, and the mean time of the finished ones."""
    runs = [Run(sweep / entry["folder"], entry["seed"]) for entry in index["runs"]]
    states = [run.state for run in runs]
    failed = f", {states.count('failed')} failed" if "failed" in states else ""
    seconds = [run.summary["seconds"] for run in runs if run.state == "finished"]
    mean = f", {clock(sum(seconds) / len(seconds))} each in the mean" if seconds else ""
    return f"        {len(seconds)} of {len(runs)} runs are finished{mean}{failed}"
