"""What `train.py -m` does around its runs: checks the whole grid before the first run, reports after the last one.

The same command finds its folder again and continues there; so does a command with more seeds or more values.
"""

import json
import sys
import traceback
from hashlib import sha256
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from tril.model.atomic_files import write_json
from tril.model.runs import ROOTS, SWEEP, new_folder, state_of
from tril.scripts.ablation import grid
from tril.scripts.ablation.sweep_files import read_json
from tril.scripts.common.cli import UserError, command, fail, quoted, user_errors
from tril.scripts.common.formats import clock

LOCAL_LAUNCHERS = ("BasicLauncher", "JoblibLauncher", "LocalLauncher")  # their jobs run on this machine


class Sweep(Callback):
    """Hydra's callback around a multirun. It ends the process on errors, which Hydra would turn into warnings."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # None for a sweeper that chooses its runs one after another

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        if not config.hydra.sweeper._target_.endswith(f".{BasicSweeper.__name__}"):
            return
        try:
            self.folder = prepare_sweep(config, kwargs["config_name"])
        except UserError as error:
            fail(error)
        except Exception:
            traceback.print_exc()
            sys.exit(1)

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        if self.folder is None:
            return
        entries = read_json(self.folder / SWEEP)["cells"]
        states = {entry["folder"]: state_of(self.folder / entry["folder"]) for entry in entries}
        missing = [f"{folder} ({state})" for folder, state in states.items() if state != "finished"]
        finished = f"{len(entries) - len(missing)} of {len(entries)} runs are finished"
        print(f"\n{finished}; {command('report')} dir={self.folder}", flush=True)
        if missing:
            print(f"NOT finished: {'; '.join(missing)}; start the same command again to continue", flush=True)
            sys.exit(1)


def prepare_sweep(config: DictConfig, config_name: str) -> Path:
    """Checks and lists the runs, writes sweep.json and sets the folder of Hydra's jobs.

    Returns:
        The sweep's folder.

    Raises:
        UserError: a run is invalid.
    """
    if config.resume is not None:
        raise UserError(
            f"resume={config.resume} continues a single run; to continue a sweep, start the same command again"
        )
    for key in ("skip_invalid", "new"):
        if not isinstance(config.sweep[key], bool):
            raise UserError(f"sweep.{key}={config.sweep[key]} must be true or false")
    elsewhere = config.hydra.launcher._target_.rpartition(".")[2] not in LOCAL_LAUNCHERS
    runs, rejected = grid.compose_grid(config, config_name, elsewhere=elsewhere)
    grid.report_rejected(runs, rejected, skip_invalid=config.sweep.skip_invalid)
    if not elsewhere:  # a login node prepares no text, and its speed tells nothing about the jobs
        runs, rejected = grid.estimate_runs(runs)
        grid.report_rejected(runs, rejected, skip_invalid=config.sweep.skip_invalid)
    swept = grid.name_runs(runs)
    with user_errors():
        family = family_of(grid.without_folder(config), swept)
        folder, earlier = find_folder(config, family)
        folder.mkdir(parents=True, exist_ok=True)
    entries = [run.entry() for run in runs]
    planned = {run.folder for run in runs}
    entries += [entry for entry in earlier if entry["folder"] not in planned]
    baseline = {key: grid.value_of(config, key, config.hydra.runtime.choices.get(key)) for key in swept}
    # "cells": the name of the runs since the first version of the file
    write_json(folder / SWEEP, {"family": family, "swept": swept, "baseline": baseline, "cells": entries})

    states = [state_of(folder / run.folder) for run in runs]
    to_run = [run for run, state in zip(runs, states, strict=True) if state != "finished"]
    print(f"{grid.grid_table(runs, states)}\n\nfolder  {folder}\n{len(to_run)} of {len(runs)} runs to train", end="")
    if to_run and all(run.sizes for run in to_run):
        seconds = sum(run.sizes["estimated_seconds"] for run in to_run)
        print(f", about {clock(seconds)} of computing, estimated from a few steps of each", end="")
    print("\n", flush=True)

    with read_write(config.hydra), open_dict(config.hydra):  # Hydra composes every job from these
        config.hydra.sweep.dir, config.hydra.sweep.subdir = str(folder), "."
        sweep_dir = quoted(f"hydra.sweep.dir={folder}", ("hydra.sweep.dir",))
        config.hydra.overrides.hydra += [sweep_dir, "hydra.sweep.subdir=."]
    return folder


def family_of(config: DictConfig, swept: list[str]) -> str:
    """A hash that is equal for all commands that sweep the same keys over the same settings: they share a folder."""
    base = grid.settings_of(config) | {"seed": None}
    return sha256(json.dumps([sorted(swept), base], sort_keys=True).encode()).hexdigest()


def find_folder(config: DictConfig, family: str) -> tuple[Path, list[dict]]:
    """The folder of the sweep and the entries of its earlier runs.

    Raises:
        ValueError: the chosen folder belongs to another sweep.
    """
    if any(override.startswith("hydra.sweep.dir=") for override in config.hydra.overrides.hydra):
        folder = Path(config.hydra.sweep.dir)
        if not (folder / SWEEP).is_file():
            return folder, []
        earlier = read_index(folder / SWEEP)
        if earlier["family"] != family:
            raise ValueError(f"hydra.sweep.dir={folder} holds a sweep of other keys or settings; choose another folder")
        return folder, earlier["cells"]
    if not config.sweep.new:
        known = Path(ROOTS[1]).glob(f"*/*/{SWEEP}")
        for path in sorted(known, key=lambda path: path.stat().st_mtime, reverse=True):
            if (earlier := read_index(path))["family"] == family:
                return path.parent, earlier["cells"]
    return new_folder(ROOTS[1]), []


def read_index(path: Path) -> dict:
    """The family and the runs of a sweep.json."""
    try:
        content = read_json(path)
        return {"family": content["family"], "cells": content["cells"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of runs ({error}); restore it, or move its folder away") from error
