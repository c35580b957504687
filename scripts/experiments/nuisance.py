"""Settings that are tuned for each variant of a sweep (`sweep.tune`): trials, and the values that they choose.

A trial is an ordinary run of a variant with other values of the tuned settings and a seed of its own. The trial with
the lowest loss on the documents that are not compared (`losses.is_tuning`) chooses. The jobs of a variant's runs train
its trials: each takes a trial that is not locked, and when none is left, waits for the others. What is chosen follows
from the finished trials alone, so it is the same for every job and after a restart.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tril.model.runs import FAILURE, state_of
from tril.scripts.experiments import run_process
from tril.scripts.experiments.losses import tuning_loss
from tril.scripts.experiments.run_process import ENDED
from tril.scripts.experiments.sweep import Run, Sweep, text_of

if TYPE_CHECKING:
    from tril.scripts.experiments.grid import PlannedRun

FOLDER = "tune"  # of the trials, below that of the sweep
SEED = 1000  # of the trials; never of a run that is compared
EXAMPLE = "sweep.tune={optim.lr_scale:[0.5,0.71,1,1.41,2]}"


class TuningFailed(Exception):
    """No trial of the variant gave a loss."""


@dataclass(frozen=True)
class Tuning:
    """The trials of a variant.

    Attributes:
        chosen: the values with the lowest loss.
        losses: values -> nats per token on the documents that choose, in the order of the setting; infinite if a trial
            failed or diverged.
        edges: the tuned settings, such as "lr_scale=2", whose chosen value is an end of their range.
    """

    chosen: str
    losses: dict[str, float]
    edges: tuple[str, ...]


def check_tune(tune: Any, swept: Sequence[str], seeds: Sequence[int]) -> None:
    """Raises ValueError unless `tune` maps settings to at least two values each, none of which is swept."""
    if not isinstance(tune, Mapping) or not tune:
        raise ValueError(f"sweep.tune={tune} must name settings with their values, such as {EXAMPLE}")
    for key, values in tune.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or len(set(map(text_of, values))) < 2:
            raise ValueError(
                f"sweep.tune: {key}={text_of(values)} must be a list of at least two values, as in {EXAMPLE}"
            )
        if key in swept:
            raise ValueError(f"{key} is swept and in sweep.tune; leave out one of them")
    if SEED in seeds:
        raise ValueError(f"seed={SEED} is that of the trials of sweep.tune; choose other seeds")


def with_values(overrides: Sequence[str], values: Mapping[str, object], seed: int | None = None) -> list[str]:
    """The overrides of a run with other values of some settings, and another seed."""
    values = dict(values) if seed is None else {**values, "seed": seed}
    kept = [text for text in overrides if text.partition("=")[0].lstrip("+") not in values]
    return [*kept, *(f"{key}={text_of(value)}" for key, value in values.items())]


def combinations(tune: Mapping[str, Sequence]) -> list[dict[str, object]]:
    """All combinations of the tuned values."""
    return [dict(zip(tune, values, strict=True)) for values in itertools.product(*tune.values())]


def trial_entries(run: "PlannedRun", tune: Mapping[str, Sequence]) -> list[dict]:
    """The entries of sweep.json of the trials of a variant, one of whose runs is given."""
    return [
        run.entry()
        | {"folder": f"{FOLDER}/{run.variant}/{name_of(values)}", "seed": SEED, "tuned": values}
        | {"overrides": with_values(run.overrides, values, SEED)}
        for values in combinations(tune)
    ]


def name_of(values: Mapping[str, object]) -> str:
    """Such as "lr_scale=2"."""
    return ",".join(f"{key.rpartition('.')[2]}={text_of(value)}" for key, value in values.items())


def retry_failed(sweep: Path, trials: Sequence[dict], runs: Sequence[dict]) -> None:
    """Lets a new launch train the failed trials of a variant again, unless its runs have begun with a choice."""
    begun = [run["values"] for run in runs if state_of(sweep / run["folder"]) in ("finished", "unfinished")]
    for trial in trials:
        if trial["values"] not in begun:
            (sweep / trial["folder"] / FAILURE).unlink(missing_ok=True)


def tune_variant(sweep: Path, trials: Sequence[dict]) -> dict[str, object] | None:
    """Trains what is left of a variant's trials, and chooses its values.

    Args:
        trials: their entries of sweep.json.

    Returns:
        Setting -> value; None if a trial was stopped by a signal.

    Raises:
        TuningFailed: all trials failed or diverged.
    """
    waiting = False
    while left := [trial for trial in trials if state_of(sweep / trial["folder"]) not in ENDED]:
        trained = False
        for trial in left:
            folder = sweep / trial["folder"]
            folder.mkdir(parents=True, exist_ok=True)
            with run_process.locked(folder) as lock:
                if lock is None or state_of(folder) in ENDED:
                    continue
                run_process.train_locked(folder, trial["overrides"], trial["folder"], lock)
            if state_of(folder) not in ENDED:
                return None
            trained = True
        if not trained:
            if not waiting:
                print(f"wait    {left[0]['folder']}: other processes are training the last trials", flush=True)
            waiting = True
            time.sleep(run_process.LOCK_POLL_SECONDS)
    losses = [trial_loss(sweep, trial) for trial in trials]
    if min(losses) == math.inf:
        messages = [message for trial in trials if (message := Run(sweep / trial["folder"], SEED).message)]
        first = f", the first: {messages[0]}" if messages else ""
        raise TuningFailed(f"all {len(trials)} trials failed or diverged{first}")
    return trials[losses.index(min(losses))]["tuned"]


def trial_loss(sweep: Path, trial: Mapping[str, Any]) -> float:
    return tuning_loss(Run(sweep / trial["folder"], trial["seed"]))


def read_tuning(sweep: Sweep) -> dict[str, Tuning]:
    """Label -> trials of each variant whose trials have ended; {} for a sweep that was not tuned."""
    tunings = {}
    for variant in sweep.variants:
        trials = [each for each in sweep.index.get("trials", []) if each["values"] == variant.values]
        if not trials or any(state_of(sweep.folder / each["folder"]) not in ENDED for each in trials):
            continue
        losses = [trial_loss(sweep.folder, trial) for trial in trials]
        chosen, edges = trials[losses.index(min(losses))]["tuned"], []
        for key, value in chosen.items():
            numbers = [trial["tuned"][key] for trial in trials]
            if all(isinstance(x, int | float) for x in numbers) and value in (min(numbers), max(numbers)):
                edges.append(name_of({key: value}))
        names = [name_of(trial["tuned"]) for trial in trials]
        tunings[variant.label] = Tuning(name_of(chosen), dict(zip(names, losses, strict=True)), tuple(edges))
    return tunings
