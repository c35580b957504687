"""A sweep on disk: its variants, their runs and the baseline.

A variant is a configuration without its seed: the runs of a variant differ in their seed alone.
"""

import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tril.data.settings import flatten
from tril.model.atomic_files import reading
from tril.model.intervals import Interval, mean_interval
from tril.model.runs import FAILURE, SETTINGS, SUMMARY, SWEEP, partial_validation, read_settings, state_of
from tril.model.runs import Run as RunFolder

NO_VARIANT = ("seed", "output_dir", "resume", "sweep", "callbacks", "logger")  # settings that do not define a variant
LOSSES = ("final_val_loss", "final_val_bpb", "best_val_loss", "best_val_bpb")
RUNNING = ("unfinished", "not started")


@dataclass(frozen=True)
class Run:
    """One run of a sweep, finished or not. Damaged files raise a ValueError that names them.

    Attributes:
        values: of the swept keys.
    """

    folder: Path
    seed: int
    values: Mapping[str, object] = field(default_factory=dict)

    @functools.cached_property
    def state(self) -> str:
        """finished, failed, unfinished or not started."""
        return state_of(self.folder)

    @functools.cached_property
    def summary(self) -> dict:
        """The content of summary.json, {} unless finished. A diverged loss is NaN, which JSON does not have."""
        if self.state != "finished":
            return {}
        summary = RunFolder(self.folder).summary
        if "flops_per_token" in summary:
            summary["training_flops"] = summary["flops_per_token"] * summary["tokens"]
        return summary | {name: math.nan for name in LOSSES if name in summary and summary[name] is None}

    @functools.cached_property
    def settings(self) -> dict[str, object]:
        """Dotted keys and values of config.yaml; {} before the run has started."""
        path = self.folder / SETTINGS
        return flatten(read_settings(path)) if path.is_file() else {}

    @property
    def message(self) -> str:
        """The error of a failed run."""
        path = self.folder / FAILURE
        with reading(path):
            return str(json.loads(path.read_text("utf-8"))["message"]) if self.state == "failed" else ""

    @property
    def diverged(self) -> bool:
        return self.summary.get("diverged") is not None or not math.isfinite(self.summary["final_val_loss"])

    @functools.cached_property
    def windows(self) -> dict[str, np.ndarray] | None:
        """Losses of the last validation; None if they were not kept, or the run diverged after it."""
        return None if self.summary and self.diverged else RunFolder(self.folder).windows


@dataclass(frozen=True)
class Variant:
    """Values of the swept keys, and the runs in the order of their seeds, one for each seed."""

    values: Mapping[str, object]
    label: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state == "finished")

    def figures(self, name: str) -> list[float]:
        """A number of the summary of each finished run that has it."""
        return [run.summary[name] for run in self.finished if run.summary.get(name) is not None]

    def estimate(self, name: str) -> Interval:
        """Its mean and interval over the finished seeds."""
        return mean_interval(self.figures(name))


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        keys: the swept keys without the seed.
        launches: the commands that added runs; none of a folder of other runs.
    """

    folder: Path
    keys: tuple[str, ...]
    variants: tuple[Variant, ...]
    baseline: Variant
    launches: Sequence[dict] = ()

    @property
    def others(self) -> list[Variant]:
        return [variant for variant in self.variants if variant is not self.baseline]

    @property
    def runs(self) -> list[Run]:
        return [run for variant in self.variants for run in variant.runs]

    @property
    def launch(self) -> int:
        """The number of the last launch, from 1, which decides the level of a comparison."""
        return max(1, len(self.launches))

    def agreement(self, variant: Variant) -> int:
        """The number of swept keys with the value that a run without the sweep has."""
        defaults = self.launches[0]["baseline"] if self.launches else {}
        return sum(key in defaults and text_of(defaults[key]) == text_of(x) for key, x in variant.values.items())

    def find(self, setting: str, asked: str) -> Variant:
        """The variant that a setting of report.py names by its label or by values, such as "model.n_heads=4".

        Of several variants with these values, it is the one that agrees most with the settings without the sweep.

        Raises:
            ValueError: no variant, or several; lists the labels.
        """
        names = short_names(self.keys)
        parts = {part.strip() for part in re.split(r",(?=[^,=]+=)", asked)}  # but no comma within a list

        def matches(variant: Variant) -> bool:
            texts = {f"{name}={text_of(x)}" for key, x in variant.values.items() for name in (key, names[key])}
            return parts <= texts or variant.label == asked.strip()

        matching = [variant for variant in self.variants if matches(variant)]
        matching = [each for each in matching if self.agreement(each) == max(map(self.agreement, matching))]
        if len(matching) != 1:
            problem = "matches several variants" if matching else "is not a variant"
            labels = "; ".join(variant.label for variant in matching or self.variants)
            raise ValueError(f"{setting}={asked} {problem}; choose one of: {labels}")
        return matching[0]


def read_sweep(folder: str | Path, baseline: str | None = None) -> Sweep:
    """Reads a sweep by its launches, or else all runs below the folder: the settings in which they differ are swept.

    Of two runs of one variant and seed, the newest finished one counts, or the newest if none is finished.

    Args:
        folder: of the sweep.
        baseline: see `Sweep.find`. None: the variant that agrees most with the settings without the sweep; without
            launches, the first one.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a damaged file, runs that scored other parts of the validation part, or a baseline that is not a
            variant.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name a sweep's, below multirun/")
    launches = read_launches(folder)
    with reading(folder / SWEEP):
        swept = [str(key) for launch in launches[:1] for key in launch["swept"]]
        planned = planned_runs(launches).values()
        runs = [Run(folder / x["folder"], int(x["seed"]), {key: x["values"][key] for key in swept}) for x in planned]
    runs = runs or discovered_runs(folder)
    if not runs:
        raise FileNotFoundError(f"{folder} has neither {SWEEP} nor a run with {SETTINGS}; name a sweep's folder")
    variants: dict[str, dict[int, Run]] = {}
    for run in runs:
        of_seeds = variants.setdefault(text_of(run.values), {})
        of_seeds[run.seed] = max(of_seeds.get(run.seed, run), run, key=_precedence)
    keys = tuple(runs[0].values)
    every = []
    for of_seeds in variants.values():
        members = tuple(of_seeds[seed] for seed in sorted(of_seeds))
        every.append(Variant(members[0].values, label_of(members[0].values, short_names(keys)), members))
    sweep = Sweep(folder, keys, tuple(every), every[0], launches)
    scored_part(sweep.runs)
    chosen = max(every, key=sweep.agreement) if baseline is None else sweep.find("baseline", baseline)
    return replace(sweep, baseline=chosen)


def scored_part(runs: Iterable[Run]) -> str | None:
    """How much of the validation part all runs with a loss have scored, such as "16 of 1,110 windows"; None: all of it.

    Raises:
        ValueError: trainer.limit_val_batches has shortened it for some, and not in the same way for all.
    """
    scored = [run for run in runs if run.summary and not run.diverged]
    parts = {partial_validation(run.summary.get("val_windows")): run.folder for run in scored}
    if len(parts) > 1:
        found = ", ".join(f"{part or 'all'} in {folder}" for part, folder in parts.items())
        remedy = "train them with the same trainer.limit_val_batches"
        raise ValueError(f"the runs have scored different parts of the validation part, {found}; {remedy}")
    return next(iter(parts), None)


def read_launches(folder: Path) -> list[dict]:
    """The lines of launches.jsonl, one for each command that added runs; [] without the file.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / SWEEP
    with reading(path):
        launches = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
        return [launch | {"baseline": dict(launch["baseline"])} for launch in launches]


def planned_runs(launches: Sequence[dict]) -> dict[str, dict]:
    """The runs of all launches by their folders."""
    return {run["folder"]: run for launch in launches for run in launch["runs"]}


def discovered_runs(folder: Path) -> list[Run]:
    """The runs with a config.yaml below the folder, in the order of the values in which they differ."""
    runs: list[Run] = []
    for path in sorted(folder.rglob(SETTINGS), key=lambda path: (len(path.parts), path)):
        if any(path.is_relative_to(run.folder) for run in runs):
            continue  # a logger's, within a run
        settings = read_settings(path)
        if isinstance(settings.get("seed"), int) and "model" in settings:  # not a file of something else
            runs.append(Run(path.parent, settings["seed"]))
    every_key = dict.fromkeys(key for run in runs for key in run.settings)
    texts = {key: {text_of(run.settings[key]) for run in runs if key in run.settings} for key in every_key}
    keys = [key for key in texts if key.partition(".")[0] not in NO_VARIANT and len(texts[key]) > 1]
    found = [replace(run, values={key: run.settings.get(key) for key in keys}) for run in runs]
    return sorted(found, key=lambda run: [_order(value) for value in run.values.values()])


def _precedence(run: Run) -> tuple:
    """Of two runs of one variant and seed, the one with the larger value counts."""
    times = [path.stat().st_mtime_ns for path in (run.folder / SUMMARY, run.folder / SETTINGS) if path.is_file()]
    return run.state == "finished", max(times, default=0), str(run.folder)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each key with its name in labels: the last component, if it is unique."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def label_of(values: Mapping[str, object], names: Mapping[str, str] | None = None) -> str:
    """The values as a text, with other `names` for some keys."""
    return ", ".join(f"{(names or {}).get(key, key)}={text_of(x)}" for key, x in values.items()) or "the configuration"


def text_of(value: object) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _order(value: object) -> tuple:
    """Sort key: numbers by size, then everything else by name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, value, "")
    return (1, 0, text_of(value))
