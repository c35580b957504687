"""A sweep on disk: its variants, their runs and the baseline.

A variant is a configuration without its seed: the runs of a variant differ in their seed alone.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tril.data.settings import flatten, printable
from tril.model import runs
from tril.model.atomic_files import reading
from tril.model.intervals import Interval, mean_interval
from tril.model.runs import FAILURE, METRICS, SETTINGS, SWEEP, state_of

NO_VARIANT = ("seed", "output_dir", "resume", "callbacks", "logger")  # settings that do not define a variant
LOSSES = ("final_val_loss", "final_val_bpb", "best_val_loss", "best_val_bpb")
OF_A_LAUNCH = ("date", "command", "seeds", "family", "swept", "baseline", "runs")  # in launches.jsonl
OF_A_RUN = ("folder", "values", "seed", "arguments")
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
        summary = runs.Run(self.folder).summary
        flops, tokens = summary.get("flops_per_token"), summary.get("tokens")
        if flops is not None and tokens is not None:
            summary["training_flops"] = flops * tokens
        return summary | {name: math.nan for name in LOSSES if name in summary and summary[name] is None}

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
        return None if self.diverged else runs.Run(self.folder).windows


@dataclass(frozen=True)
class Variant:
    """Values of the swept keys, and the runs in the order of their seeds, one for each seed."""

    values: Mapping[str, object]
    runs: tuple[Run, ...]

    @property
    def label(self) -> str:
        return label_of(self.values)

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state == "finished")

    def estimate(self, name: str) -> Interval:
        """The mean and the interval of a number over the finished runs that have it in their summary."""
        return mean_interval([run.summary[name] for run in self.finished if run.summary.get(name) is not None])


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

    def find(self, setting: str, asked: str | None) -> Variant:
        """The variant that a setting of report.py names by its label or by values, such as "model.n_heads=4".

        Of several variants with these values, it is the one that agrees most with the settings without the sweep.

        Args:
            asked: None: of all variants, the first of those that agree most.

        Raises:
            ValueError: no variant, or several; lists the labels.
        """
        defaults = {key: text_of(x) for launch in self.launches[:1] for key, x in launch["baseline"].items()}
        agreement = {}  # of each variant that matches -> the number of its values without the sweep
        for variant in self.variants:
            texts = {key: text_of(value) for key, value in variant.values.items()}
            rest = asked or ""
            for named in (texts, short_names(texts)):
                for part in sorted((f"{key}={text}" for key, text in named.items()), key=len, reverse=True):
                    rest = rest.replace(part, "", 1)
            if not rest.strip(", "):
                agreement[variant.label] = sum(defaults.get(key) == text for key, text in texts.items())
        best = [each for each in self.variants if agreement.get(each.label) == max(agreement.values(), default=0)]
        if asked is not None and len(best) != 1:
            problem = "matches several variants" if best else "is not a variant"
            labels = "; ".join(variant.label for variant in best or self.variants)
            raise ValueError(f"{setting}={asked} {problem}; choose one of: {labels}")
        return best[0]


def read_sweep(folder: str | Path, baseline: str | None = None) -> Sweep:
    """Reads a sweep by its launches, or else all runs below the folder: the settings in which they differ are swept.

    Args:
        folder: of the sweep.
        baseline: see `Sweep.find`.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a damaged file, or a baseline that is not a variant.
    """
    folder = Path(folder)
    launches = read_launches(folder)
    with reading(folder / SWEEP):
        swept = [str(key) for launch in launches[:1] for key in launch["swept"]]
        planned = planned_runs(launches).values()
        members = [Run(folder / x["folder"], int(x["seed"]), {key: x["values"][key] for key in swept}) for x in planned]
    members = members or discovered_runs(folder)
    if not members:
        raise FileNotFoundError(f"{folder} has neither {SWEEP} nor runs; name a sweep's folder, below multirun/")
    groups: dict[str, list[Run]] = {}
    for run in members:
        groups.setdefault(text_of(run.values), []).append(run)
    variants = [Variant(of[0].values, tuple(sorted(of, key=lambda run: run.seed))) for of in groups.values()]
    sweep = Sweep(folder, tuple(members[0].values), tuple(variants), variants[0], launches)
    return replace(sweep, baseline=sweep.find("baseline", baseline))


def read_launches(folder: Path) -> list[dict]:
    """The lines of launches.jsonl, one for each command that added runs; [] without the file.

    Raises:
        ValueError: it is damaged.
    """
    path = folder / SWEEP
    with reading(path):  # a missing entry is a KeyError
        lines = path.read_text("utf-8").splitlines() if path.is_file() else []
        launches = [{name: launch[name] for name in OF_A_LAUNCH} for launch in map(json.loads, lines)]
        for launch in launches:
            launch["baseline"] = dict(launch["baseline"])
            launch["runs"] = [run | {name: run[name] for name in OF_A_RUN} for run in launch["runs"]]
        return launches


def planned_runs(launches: Sequence[dict]) -> dict[str, dict]:
    """The runs of all launches by their folders."""
    return {run["folder"]: run for launch in launches for run in launch["runs"]}


def discovered_runs(folder: Path) -> list[Run]:
    """The runs below the folder, in the order of the values in which they differ.

    Of two runs of one variant and seed, the newest finished one counts, or the newest if none is finished.
    """
    paths = [path for path in sorted(folder.rglob(SETTINGS)) if (path.parent / METRICS).is_file()]  # not of a logger
    found = {path.parent: flatten(runs.read_settings(path)) for path in paths}
    texts: dict[str, set[str]] = {}
    for settings in found.values():
        for key, value in settings.items():
            texts.setdefault(key, set()).add(text_of(value))
    keys = [key for key in texts if key.partition(".")[0] not in NO_VARIANT and len(texts[key]) > 1]
    members = [
        Run(each, seed, {key: x.get(key) for key in keys})
        for each, x in found.items()
        if isinstance(seed := x.get("seed"), int)
    ]
    members.sort(key=lambda run: (run.state == "finished", (run.folder / SETTINGS).stat().st_mtime_ns))
    counted = {(run.seed, text_of(run.values)): run for run in members}.values()  # the last one of each
    return sorted(counted, key=lambda run: [*map(_order, run.values.values())])


def short_names(values: Mapping[str, object]) -> dict[str, object]:
    """The values by the last components of their keys, where these are unique."""
    last = [key.rpartition(".")[2] for key in values]
    return {name if last.count(name) == 1 else key: values[key] for key, name in zip(values, last, strict=True)}


def label_of(values: Mapping[str, object]) -> str:
    """The values as a text."""
    return ", ".join(f"{key}={printable(text_of(x))}" for key, x in short_names(values).items()) or "the configuration"


def text_of(value: object) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _order(value: object) -> tuple:
    """Sort key: numbers by size, then everything else by name."""
    return (0, value, "") if isinstance(value, int | float) else (1, 0, text_of(value))
