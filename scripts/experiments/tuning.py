"""The trials that choose the learning rates of an arm (`+tune=lr`), trained by the jobs of the arm's own runs.

Several jobs of an arm share its trials: each takes a trial whose folder is not locked, and when none is left, waits for
the others. What is chosen follows from the finished trials alone, so it is the same for every job and after a restart.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tril.model.atomic_files import write_json
from tril.model.runs import FAILURE, state_of
from tril.scripts.experiments import run_process
from tril.scripts.experiments.losses import tuning_loss
from tril.scripts.experiments.sweep import Run, read_json
from tril.scripts.experiments.tune_settings import TuneConfig, at_edge, best_multiplier, trial_name, trial_overrides

CHOSEN = "chosen.json"  # in the folder of an arm
ENDED = ("finished", "failed")

Trial = tuple[float, int]  # multiplier and seed


class TuningFailed(Exception):
    """No trial of the arm gave a loss."""


def tune_arm(sweep: Path, arm: str, overrides: Sequence[str], config: TuneConfig) -> float | None:
    """Trains what is left of an arm's trials, and chooses its multiplier.

    Args:
        sweep: its folder.
        arm: the folder of the arm's trials, relative to the sweep's.
        overrides: of a run of the arm.

    Returns:
        The multiplier; None if a trial was stopped by a signal.

    Raises:
        TuningFailed: all trials failed or diverged.
    """
    folder = sweep / arm
    folder.mkdir(parents=True, exist_ok=True)
    waiting = False
    while (chosen := read_chosen(folder)) is None:
        losses, missing = progress_of(folder, config)
        trained = False
        if not missing:
            with run_process.locked_if_free(folder / CHOSEN) as lock:  # one job writes and prints the choice
                if lock is not None:
                    choose(folder, arm, losses, config)
                    continue
        for multiplier, seed in missing:
            name = trial_name(multiplier, seed)
            (folder / name).mkdir(exist_ok=True)
            with run_process.locked_if_free(folder / name) as lock:
                if lock is None or state_of(folder / name) in ENDED:
                    continue
                command = trial_overrides(overrides, multiplier, seed)
                run_process.train_locked(folder / name, command, f"{arm}/{name}", lock)
            if state_of(folder / name) not in ENDED:
                return None
            trained = True
        if not trained:
            if not waiting:
                print(f"wait    {arm}: other processes are training its last trials", flush=True)
            waiting = True
            time.sleep(run_process.LOCK_POLL_SECONDS)
    return chosen["lr_scale"]


def progress_of(folder: Path, config: TuneConfig) -> tuple[dict[float, float], list[Trial]]:
    """Losses of the multipliers whose trials have ended, and the trials that the rule asks for next.

    Args:
        folder: of an arm's trials.
    """
    losses: dict[float, float] = {}
    multipliers = config.multipliers
    while multipliers:
        trials = [(multiplier, seed) for multiplier in multipliers for seed in config.seeds]
        missing = [trial for trial in trials if state_of(folder / trial_name(*trial)) not in ENDED]
        if missing:
            return losses, missing
        for multiplier in multipliers:
            of_seeds = [trial_loss(folder / trial_name(multiplier, seed), seed) for seed in config.seeds]
            losses[multiplier] = float(np.mean(of_seeds))
        extension = config.next_multiplier(losses)
        multipliers = () if extension is None else (extension,)
    return losses, []


def trial_loss(folder: Path, seed: int) -> float:
    """Loss of a trial on the tuning text; infinite if it failed or diverged."""
    return tuning_loss(Run(folder, seed))


def choose(folder: Path, arm: str, losses: dict[float, float], config: TuneConfig) -> None:
    """Writes and prints the choice unless another job has done so.

    Raises:
        TuningFailed: there is none.
    """
    if read_chosen(folder) is not None:
        return
    best, n_trials = best_multiplier(losses), len(losses) * len(config.seeds)
    trials = [folder / trial_name(multiplier, seed) for multiplier in losses for seed in config.seeds]
    if best is None:
        first = next((read_json(trial / FAILURE)["message"] for trial in trials if state_of(trial) == "failed"), None)
        raise TuningFailed(
            f"all {n_trials} trials of {arm} failed or diverged{f', the first: {first}' if first else ''}"
        )
    summaries = [Run(trial, 0).summary for trial in trials if state_of(trial) == "finished"]
    content = {
        "lr_scale": best,
        "curve": [[multiplier, losses[multiplier]] for multiplier in sorted(losses)],
        "at_edge": at_edge(losses),
        "trials": n_trials,
        "failed": n_trials - len(summaries),
        "seconds": sum(summary["seconds"] for summary in summaries),
        "training_flops": sum(summary["flops_per_token"] * summary["tokens"] for summary in summaries),
    }
    write_json(folder / CHOSEN, content)
    curve = ", ".join(f"{multiplier:g}: {losses[multiplier]:.4f}" for multiplier in sorted(losses))
    edge = "; an end of the range: a better one may be outside of it" if content["at_edge"] else ""
    print(f"chosen  {arm}: optim.lr_scale={best:g}{edge} (nats per token on the tuning text: {curve})", flush=True)


def read_chosen(folder: Path) -> dict | None:
    """The choice of an arm; None if its trials have not ended."""
    return read_json(folder / CHOSEN) if (folder / CHOSEN).is_file() else None


def retry_failed(folder: Path) -> None:
    """Lets a new launch train the failed trials of an arm without a choice again."""
    for path in folder.glob(f"*/{FAILURE}") if read_chosen(folder) is None else ():
        path.unlink()


def planned_trials(folder: Path, arm: str, config: TuneConfig) -> list[dict]:
    """Folder, seed and multiplier of each trial of an arm that the rule asks for so far."""
    chosen = read_chosen(folder)
    multipliers = [row[0] for row in chosen["curve"]] if chosen else config.multipliers
    return [
        {"folder": f"{arm}/{trial_name(multiplier, seed)}", "seed": seed, "lr_scale": multiplier}
        for multiplier in multipliers
        for seed in config.seeds
    ]
