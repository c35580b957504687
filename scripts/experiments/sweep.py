"""A sweep on disk: its variants, their runs and the baseline.

A variant is a configuration without its seed: the runs of a variant differ in their seed alone.
"""

import functools
import json
import math
import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np

from tril.data.settings import flatten
from tril.model.intervals import Interval, mean_interval
from tril.model.runs import FAILURE, SETTINGS, SUMMARY, SWEEP, partial_validation, read_settings, state_of
from tril.model.runs import Run as RunFolder

NO_VARIANT = ("seed", "output_dir", "resume", "sweep", "callbacks", "logger")  # settings that do not define a variant
LOSSES = ("final_val_loss", "final_val_bpb", "best_val_loss", "best_val_bpb")
WINDOWS = "windows_last.npz"
RUNNING = ("unfinished", "not started")


@dataclass(frozen=True)
class Run:
    """One run of a sweep, finished or not. Damaged files raise a ValueError that names them.

    Attributes:
        planned: its entry of launches.jsonl; {} without one.
    """

    folder: Path
    seed: int
    planned: dict = field(default_factory=dict)

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
        return summary | {name: math.nan for name in LOSSES if name in summary and summary[name] is None}

    @functools.cached_property
    def settings(self) -> dict[str, object]:
        """Dotted keys and values of config.yaml; {} before the run has started."""
        path = self.folder / SETTINGS
        return flatten(RunFolder(self.folder).settings) if path.is_file() else {}

    @property
    def message(self) -> str:
        """The error of a failed run."""
        text = str(read_json(self.folder / FAILURE).get("message", "")) if self.state == "failed" else ""
        return text.encode(errors="replace").decode()  # it may contain bytes that are no text

    @property
    def diverged(self) -> bool:
        return self.summary.get("diverged") is not None or not math.isfinite(self.summary["final_val_loss"])

    def figure(self, name: str) -> float | None:
        """A number of the summary, or else as planned; "training_flops" of a finished run."""
        if name == "training_flops":
            per_token, tokens = self.figure("flops_per_token"), self.summary.get("tokens")
            return None if per_token is None or tokens is None else per_token * tokens
        measured = self.summary.get(name)
        return self.planned.get(name) if measured is None else measured

    @functools.cached_property
    def curves(self) -> dict[str, np.ndarray]:
        """The losses so far: "val" and "train" -> training tokens and loss, (n, 2)."""
        try:
            rows = [row for row in RunFolder(self.folder).metrics if "train/tokens" in row]
        except FileNotFoundError:
            rows = []
        points = {
            name: [(row["train/tokens"], row[f"{name}/loss"]) for row in rows if f"{name}/loss" in row]
            for name in ("val", "train")
        }
        return {name: np.array(each, float).reshape(-1, 2) for name, each in points.items()}

    @functools.cached_property
    def windows(self) -> dict[str, np.ndarray] | None:
        """Losses of the last validation; None if they were not kept, or the run diverged after it.

        For each of N windows, and of D documents in the order of the text: "nll", "targets", (N,), the sum of its
        losses in nats and its number of targets; "document_nll", "document_targets", (D,); "context_length".
        """
        path = self.folder / WINDOWS
        if not path.is_file() or (self.summary and self.diverged):
            return None
        try:
            with np.load(path) as arrays:
                names = ("nll", "targets", "document_nll", "document_targets", "context_length")
                return {name: arrays[name] for name in names if name in arrays}
        except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it, or train that run again") from error


@dataclass(frozen=True)
class Variant:
    """Values of the swept keys, and the runs in the order of their seeds, one for each seed."""

    values: dict[str, object]
    label: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state == "finished")

    def figures(self, name: str) -> list[float]:
        """A number of the summary of the finished runs that have it."""
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


def read_sweep(folder: str | Path, baseline: str | None = None) -> Sweep:
    """Reads a sweep by its launches, or else all runs below the folder: the settings in which they differ are swept.

    Of two runs of one variant and seed, the newest finished one counts, or the newest if none is finished.

    Args:
        folder: of the sweep.
        baseline: a variant's label, or values of swept keys, such as "model.n_heads=4" or "n_heads=4,window=64".
            None: the variant that agrees most with the settings without the sweep; without launches, the first one.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a damaged file, runs that scored other parts of the validation part, or a baseline that is not a
            variant.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name a sweep's, below multirun/")
    launches = read_launches(folder)
    keys, runs = _planned_runs(folder, launches) if launches else _discovered_runs(folder)
    if not runs:
        raise FileNotFoundError(f"{folder} has neither {SWEEP} nor a run with {SETTINGS}; name a sweep's folder")
    variants: dict[str, tuple[dict, dict[int, Run]]] = {}
    for values, run in runs:
        _, of_seeds = variants.setdefault(text_of(values), (values, {}))
        of_seeds[run.seed] = max(of_seeds.get(run.seed, run), run, key=_precedence)
    last = [key.rpartition(".")[2] for key in keys]
    names = {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}
    every = [
        Variant(values, label_of(values, names), tuple(of_seeds[seed] for seed in sorted(of_seeds)))
        for values, of_seeds in variants.values()
    ]
    chosen = _choose_baseline(every, names, baseline, launches[0]["baseline"] if launches else {})
    sweep = Sweep(folder, keys, tuple(every), chosen, launches)
    scored_part(sweep.runs)
    for run in sweep.runs:  # so that a damaged file is found here
        _ = run.settings, run.curves, run.message
    return sweep


def scored_part(runs: Iterable[Run]) -> str | None:
    """How much of the validation part all finished runs have scored, such as "16 of 1,110 windows"; None: all of it.

    Raises:
        ValueError: trainer.limit_val_batches has shortened it for some, and not in the same way for all.
    """
    parts = {run.folder: partial_validation(run.summary.get("val_windows")) for run in runs if run.summary}
    if not parts:
        return None
    (first, of_first), *others = parts.items()
    for folder, part in others:
        if part != of_first:
            both = f"{first} has scored {of_first or 'all'} of its validation part and {folder} {part or 'all'}"
            raise ValueError(f"{both}; train them with the same trainer.limit_val_batches")
    return of_first


def read_launches(folder: Path) -> list[dict]:
    """The lines of launches.jsonl, one for each command that added runs; [] without the file.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / SWEEP
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        launches = [json.loads(line) for line in lines]
        for launch in launches:
            _ = launch["swept"], launch["baseline"], launch["family"], launch["seeds"]
            _ = [(run["folder"], run["values"], int(run["seed"]), run["arguments"]) for run in launch["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); restore it, or remove it to read the runs below") from error
    return launches


def planned_runs(launches: Sequence[dict]) -> dict[str, dict]:
    """The runs of all launches by their folders."""
    return {run["folder"]: run for launch in launches for run in launch["runs"]}


def _planned_runs(folder: Path, launches: Sequence[dict]) -> tuple[tuple[str, ...], list[tuple[dict, Run]]]:
    """Swept keys, and values and run of each planned run."""
    runs = planned_runs(launches).values()
    return tuple(launches[0]["swept"]), [(run["values"], Run(folder / run["folder"], run["seed"], run)) for run in runs]


def _discovered_runs(folder: Path) -> tuple[tuple[str, ...], list[tuple[dict, Run]]]:
    """The same from the config.yaml of each run below the folder, variants in the order of their values."""
    runs = []
    for path, subfolders, files in os.walk(folder):
        subfolders.sort()
        if SETTINGS in files and isinstance(settings := read_settings(Path(path) / SETTINGS), dict):
            if isinstance(settings.get("seed"), int) and "model" in settings:  # not a file of something else
                runs.append(Run(Path(path), settings["seed"]))
                subfolders.clear()  # loggers save a config.yaml of their own within a run
    every_key = dict.fromkeys(key for run in runs for key in run.settings)
    texts = {key: {text_of(run.settings[key]) for run in runs if key in run.settings} for key in every_key}
    keys = tuple(key for key in texts if key.partition(".")[0] not in NO_VARIANT and len(texts[key]) > 1)
    found = [({key: run.settings.get(key) for key in keys}, run) for run in runs]
    return keys, sorted(found, key=lambda item: [_order(value) for value in item[0].values()])


def _precedence(run: Run) -> tuple:
    """Of two runs of one variant and seed, the one with the larger value counts."""
    times = [path.stat().st_mtime_ns for path in (run.folder / SUMMARY, run.folder / SETTINGS) if path.is_file()]
    return run.state == "finished", max(times, default=0), str(run.folder)


def _choose_baseline(
    variants: Sequence[Variant], names: Mapping[str, str], asked: str | None, defaults: Mapping[str, object]
) -> Variant:
    """Raises ValueError that lists the labels."""

    def agreement(variant: Variant) -> int:
        return sum(key in defaults and text_of(defaults[key]) == text_of(x) for key, x in variant.values.items())

    if asked is None:
        return max(variants, key=agreement)  # the first of several
    # a comma within a list is not followed by "key="
    parts = [part.strip().partition("=") for part in re.split(r",(?=[^,=]+=)", asked)]
    wanted = {name: text for name, _, text in parts}
    keys = {name: key for key, label in names.items() for name in (key, label)}
    matching = [variant for variant in variants if variant.label == asked.strip()] or [
        variant
        for variant in variants
        if all(name in keys and text_of(variant.values[keys[name]]) == text for name, text in wanted.items())
    ]
    matching = [variant for variant in matching if agreement(variant) == max(map(agreement, matching))]
    if len(matching) != 1:
        problem = "matches several variants" if matching else "is not a variant"
        labels = "; ".join(variant.label for variant in matching or variants)
        raise ValueError(f"baseline={asked} {problem}; choose one of: {labels}")
    return matching[0]


def label_of(values: Mapping[str, object], names: Mapping[str, str] = MappingProxyType({})) -> str:
    """The values as a text, with other `names` for some keys."""
    return ", ".join(f"{names.get(key, key)}={text_of(value)}" for key, value in values.items()) or "the configuration"


def text_of(value: object) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _order(value: object) -> tuple:
    """Sort key: numbers by size, then everything else by name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, value, "")
    return (1, 0, text_of(value))


def read_json(path: Path) -> dict:
    """Raises ValueError for a damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it, or move it away") from error
