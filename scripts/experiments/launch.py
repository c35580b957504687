"""`train.py -m`: checks the whole grid before the first run, trains its runs, and compares them.

The folder of a sweep below multirun/ is named after its keys and its other settings. So the same command continues
there, and a command with more seeds or values adds to it. Each command that adds runs is a launch, a line of
launches.jsonl: its date and command, and the runs that it added.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from tril.model.formats import clock, shell_command
from tril.model.runs import ROOTS, SWEEP, state_of
from tril.scripts.cli.app import compose, quoted
from tril.scripts.cli.errors import UserError, user_errors
from tril.scripts.experiments import grid, run_process
from tril.scripts.experiments.sweep import Run, planned_runs, read_launches

OF_A_RUN = ("resume", "minutes")  # settings of a single run
FOLDER = "hydra.sweep.dir"
FREE = ("logger", "checkpoint", "sweep", "seed", *OF_A_RUN)  # in which the runs of a sweep may differ


def run_grid(words: Sequence[str]) -> None:
    """Trains the runs of a grid through Hydra's launcher, and prints their comparison.

    Args:
        words: of the command line, in Hydra's grammar.

    Raises:
        UserError: a run is invalid; none has been trained.
    """
    every = OverridesParser.create().parse_overrides(list(words))
    of_hydra = {each.get_key_element(): each for each in every if each.get_key_element().startswith("hydra")}
    parsed = [each for each in every if each not in of_hydra.values()]
    launcher = [str(each.input_line) for key, each in of_hydra.items() if key != FOLDER]
    hydra.compose("train", launcher)  # a wrong one is found before the text is prepared
    base = compose("train", [grid.argument_of(each) for each in parsed if not each.is_sweep_override()])
    for key in OF_A_RUN:
        if base.settings[key] is not None:
            raise UserError(f"{key}={base.settings[key]} is for a single run; start a grid again to continue it")
    of_ablation = [f"{key}={values}" for key, values in base.grid.items()]
    of_runs = [text for each in parsed if not (text := str(each.input_line)).startswith("sweep.")]
    combinations = grid.expand([*of_ablation, *of_runs])
    runs, swept = grid.plan(combinations, skip_invalid=bool(base.settings["sweep"]["skip_invalid"]))
    # A key of which one value is left is not swept, and all runs have it.
    shared = [text for text in runs[0].arguments if all(text in run.arguments for run in runs)]
    base = compose("train", shared)
    baseline = {key: grid.value_of(base.settings, key, base.choices.get(key)) for key in swept}
    with user_errors():
        chosen = str(of_hydra[FOLDER].value()) if FOLDER in of_hydra else None
        folder = record_launch(runs, swept, base.settings, baseline, chosen=chosen)
    states = [state_of(folder / run.folder) for run in runs]
    left = [run.folder for run, state in zip(runs, states, strict=True) if state != "finished"]
    print(
        f"{grid.grid_table(runs, states)}\n\nfolder  {folder}\n{len(left)} of {len(runs)} runs to train\n", flush=True
    )
    if left:
        places = [f"{FOLDER}={quoted(str(folder.absolute()))}", "hydra.sweep.subdir=."]
        jobs = f"+run={','.join(map(quoted, left))}"
        GlobalHydra.instance().hydra.multirun("train", run_job, [*launcher, *places, jobs])  # pyright: ignore
    finish(folder)


def record_launch(
    runs: Sequence[grid.PlannedRun],
    swept: Sequence[str],
    settings: Mapping[str, Any],
    baseline: Mapping[str, object],
    *,
    chosen: str | None = None,
    script: str = "train",
) -> Path:
    """Adds a line to launches.jsonl, if the command adds runs. All commands with the same keys and settings share it.

    Args:
        swept: the swept keys.
        settings: of a run without the grid.
        baseline: the values of the swept keys without the grid.
        chosen: a folder that the user names; None: one below multirun/.
        script: that the user has started.

    Returns:
        The sweep's folder.

    Raises:
        ValueError: the chosen folder belongs to another sweep, or its launches.jsonl is damaged.
    """
    shared = {key: value for key, value in settings.items() if key not in FREE}
    family = sha256(json.dumps([sorted(swept), shared], sort_keys=True).encode()).hexdigest()[:8]
    names = "+".join(key.rpartition(".")[2] for key in swept) or "seeds"
    folder = Path(chosen) if chosen else Path(ROOTS[1], f"{names[: grid.MAX_FOLDER_NAME]}-{family}")
    launches = read_launches(folder)
    if any(launch["family"] != family for launch in launches):
        raise ValueError(f"{folder} holds a sweep of other keys or settings; choose another folder")
    known = planned_runs(launches)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / SWEEP).open("a", encoding="utf-8") as file:
        if added := [run.entry() for run in runs if run.folder not in known]:
            seeds = sorted({run["seed"] for run in added} - {run["seed"] for run in known.values()})
            now = datetime.now().astimezone().isoformat(timespec="seconds")
            launch = {"date": now, "command": shell_command(script, *sys.argv[1:]), "seeds": seeds, "family": family}
            launch |= {"swept": list(swept), "baseline": dict(baseline), "runs": added}
            file.write(json.dumps(launch) + "\n")
    (folder / SWEEP).touch()  # which makes it the latest
    return folder


def run_job(cfg: DictConfig) -> float:
    """A job of Hydra's launcher, on one machine or on a cluster: trains the run `cfg.run` of the sweep.

    Returns:
        Its validation loss; NaN if it failed or was stopped.
    """
    folder = Path(HydraConfig.get().sweep.dir)
    runs = planned_runs(read_launches(folder))
    loss = run_process.train(folder / cfg.run, runs[cfg.run]["arguments"], cfg.run)
    states = [state_of(folder / name) for name in runs]
    seconds = [summary["seconds"] for name in runs if (summary := Run(folder / name, 0).summary)]
    failed = f", {n} failed" if (n := states.count("failed")) else ""
    mean = f", {clock(sum(seconds) / len(seconds))} each on average" if seconds else ""
    print(f"        {len(seconds)} of {len(runs)} runs are finished{mean}{failed}", flush=True)
    return loss


def finish(folder: Path) -> None:
    """Prints the comparison of a sweep, and which runs have not finished; then the exit status is 1."""
    from tril.scripts.experiments.report import read_report

    states = {name: state_of(folder / name) for name in planned_runs(read_launches(folder))}
    missing = [f"{name} ({state})" for name, state in states.items() if state != "finished"]
    try:
        comparison = read_report(folder).shown()
    except ValueError as error:  # runs that cannot be compared, or a damaged file
        comparison = f"no comparison: {error}"
    print(f"\n{comparison}\n", flush=True)
    finished = f"{len(states) - len(missing)} of {len(states)} runs are finished"
    print(f"{finished}; {shell_command('report', f'dir={folder}')}", flush=True)
    if missing:
        print(f"NOT finished: {'; '.join(missing)}; start the same command again to continue", flush=True)
        sys.exit(1)
