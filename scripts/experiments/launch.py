"""`train.py -m`: checks the whole grid before the first run, trains its runs, and compares them.

The folder of a sweep below multirun/ is named after its keys and its other settings. So the same command continues
there, and a command with more seeds or values adds to it. Each command that adds runs is a launch, a line of
launches.jsonl: its date and command, and the runs that it added.

Each run is an ordinary run in a separate process and folder. A crash then ends one run and not the sweep, and no run
sees memory, compiled code or random numbers of another one.
"""

import functools
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import hydra
from filelock import FileLock
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from tril.model.atomic_files import write_json, write_text
from tril.model.formats import clock, figures, shell_command
from tril.model.runs import FAILURE, ROOTS, SWEEP, check_links, is_resumable, state_of
from tril.scripts.cli.app import compose, quoted
from tril.scripts.cli.errors import UserError, user_errors
from tril.scripts.experiments import grid
from tril.scripts.experiments.sweep import Run, planned_runs, read_launches

OF_A_RUN = ("resume", "minutes")  # settings of a single run
FOLDER = "hydra.sweep.dir"
FREE = ("logger", "checkpoint", "seed", *OF_A_RUN)  # in which the runs of a sweep may differ
GIVEN = re.compile(r"[+~]*(logger=|(callbacks|logger)\.)")  # a `_target_` is not saved with a run
# -P: modules in the working directory do not shadow installed ones
PROGRAM = (sys.executable, "-P", "-m", "tril.train")


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
    runs, swept = grid.plan(grid.expand([*of_ablation, *(str(each.input_line) for each in parsed)]))
    with user_errors():
        folder = record_launch(runs, swept, chosen=str(of_hydra[FOLDER].value()) if FOLDER in of_hydra else None)
    left = [run["folder"] for run in runs if state_of(folder / run["folder"]) != "finished"]
    print(f"{grid.grid_table(runs)}\n\nfolder  {folder}\n{len(left)} of {len(runs)} runs to train\n", flush=True)
    if left:
        places = [f"{FOLDER}={quoted(str(folder.absolute()))}", "hydra.sweep.subdir=."]
        jobs = f"+run={','.join(map(quoted, left))}"
        # with these arguments, since those in the launches.jsonl of somebody else could name code
        job = functools.partial(run_job, {run["folder"]: run["arguments"] for run in runs})
        GlobalHydra.instance().hydra.multirun("train", job, [*launcher, *places, jobs])  # pyright: ignore
    finish(folder)


def record_launch(
    runs: Sequence[Mapping[str, Any]],
    swept: Sequence[str],
    *,
    baseline: Mapping[str, object] | None = None,
    chosen: str | None = None,
    script: str = "train",
) -> Path:
    """Adds a line to launches.jsonl, if the command adds runs. All commands with the same keys and settings share it.

    Args:
        runs, swept: see `grid.plan`.
        baseline: their values without the sweep; None: the defaults.
        chosen: a folder that the user names; None: one below multirun/.
        script: that the user has started.

    Returns:
        The sweep's folder.

    Raises:
        ValueError: the chosen folder belongs to another sweep, or its launches.jsonl is damaged.
    """
    # A key of which one value is left is not swept, and all runs have it.
    base = compose("train", [text for text in runs[0]["arguments"] if all(text in run["arguments"] for run in runs)])
    baseline = baseline or {key: grid.value_of(base, key) for key in swept}
    shared = {key: value for key, value in base.settings.items() if key not in FREE}
    family = sha256(json.dumps([sorted(swept), shared], sort_keys=True).encode()).hexdigest()[:8]
    names = "+".join(key.rpartition(".")[2] for key in swept) or "seeds"
    folder = Path(chosen) if chosen else Path(ROOTS[1], f"{names[: grid.MAX_FOLDER_NAME]}-{family}")
    check_links(folder, "*", "*/*")
    launches = read_launches(folder)
    if any(launch["family"] != family for launch in launches):
        raise ValueError(f"{folder} holds a sweep of other keys or settings; choose another folder")
    known = planned_runs(launches)
    folder.mkdir(parents=True, exist_ok=True)
    if added := [run for run in runs if run["folder"] not in known]:
        seeds = sorted({run["seed"] for run in added} - {run["seed"] for run in known.values()})
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        launch = {"date": now, "command": shell_command(script, *sys.argv[1:]), "seeds": seeds, "family": family}
        launch |= {"swept": list(swept), "baseline": dict(baseline), "runs": added}
        write_text(folder / SWEEP, "".join(f"{json.dumps(each)}\n" for each in [*launches, launch]))
    (folder / SWEEP).touch()  # which makes it the latest
    return folder


def run_job(arguments: Mapping[str, Sequence[str]], cfg: DictConfig) -> None:
    """A job of Hydra's launcher, on one machine or on a cluster: trains the run `cfg.run` of the sweep."""
    folder = Path(HydraConfig.get().sweep.dir)
    train(folder / cfg.run, arguments[cfg.run])
    names = planned_runs(read_launches(folder))
    finished = sum(state_of(folder / name) == "finished" for name in names)
    print(f"        {finished} of {len(names)} runs are finished", flush=True)


def train(folder: Path, arguments: Sequence[str]) -> None:
    """Runs the training process of a run to its end, from the last checkpoint if there is one.

    Waits while another process of a sweep trains the same run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, how = folder / "log.txt", "was finished before"
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if state_of(folder) != "finished":
            words = words_of(folder, arguments)
            print(f"start   {folder.name}", flush=True)
            status, how = spawn([*PROGRAM, *words], log), "finished"
            if state_of(folder) != "finished":  # a run that diverged is finished, with a status of its own
                lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").split("\n")]
                message = next(filter(None, reversed(lines)), f"ended with status {status}")
                write_json(folder / FAILURE, {"status": status, "message": message})
                return print(f"FAILED  {folder.name}: {message} (status {status}, {log})", flush=True)
        summary = Run(folder, 0).summary
    found = summary.get("diverged") or figures(summary, "final_val_")
    print(f"done    {folder.name} {how}: {found}, {clock(summary['seconds'])}", flush=True)


def words_of(folder: Path, arguments: Sequence[str]) -> list[str]:
    """The arguments that continue or start the run. Without a checkpoint, nothing in the folder is of use."""
    (folder / FAILURE).unlink(missing_ok=True)
    if is_resumable(folder):
        return [f"resume={folder}", *(text for text in arguments if GIVEN.match(text))]
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [*arguments, f"hydra.run.dir={folder}"]


def spawn(arguments: list[str], log: Path) -> int:
    """Runs a process with its output in `log` and returns its exit status. A signal that ends this process ends it."""

    def stop(signum, frame):
        print("\nstopped by SIGTERM; start the same command again to continue", flush=True)
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, stop)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)


def finish(folder: Path) -> None:
    """Prints the comparison of a sweep, and which runs have not finished; then the exit status is 1."""
    from tril.scripts.experiments.report import read_report

    states = {name: state_of(folder / name) for name in planned_runs(read_launches(folder))}
    missing = [f"{name} ({state})" for name, state in states.items() if state != "finished"]
    with user_errors():
        comparison = read_report(folder).shown()
    finished = f"{len(states) - len(missing)} of {len(states)} runs are finished"
    print(f"\n{comparison}\n\n{finished}; {shell_command('report', f'dir={folder}')}", flush=True)
    if missing:
        print(f"NOT finished: {'; '.join(missing)}; start the same command again to continue", flush=True)
        sys.exit(1)
