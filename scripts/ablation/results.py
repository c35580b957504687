"""Reads what a sweep left on disk, finished or not, and compares its variants.

A cell is one run; a variant is a configuration without its seed, so the cells that differ in seed alone. N validation windows.
"""

import csv
import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tril.model.runs import FAILURE, SUMMARY, SWEEP, state_of
from tril.scripts.ablation.statistics import Comparison, compare

CONFIG = "config.yaml"
COLUMNS = {
    "tokens": "train/tokens",
    "seconds": "train/seconds",
    "loss": "val/loss",
    "bpb": "val/bpb",
}  # of the curve, in a run's log
NO_SETTINGS = (
    "seed",
    "output_dir",
    "resume",
    "sweep",
    "callbacks",
    "logger",
)  # keys of config.yaml that make no other variant
WINDOWS_OF = {"final": "last", "best": "best"}  # which validation -> whose windows
ABSENT = "absent"  # the value of a swept key that a run of an older version lacks


@dataclass(frozen=True)
class Windows:
    """One validation: nll (N,) nats summed over the targets of each window, targets (N,) how many, windows in the order of the text."""

    step: int
    context_length: int
    nll: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True)
class Run:
    """One cell.

    state    finished | failed | unfinished | not started
    summary  what summary.json says; None where it is not finished
    planned  its entry of sweep.json; {} without one
    curve    of its validations "step", "tokens", "seconds", "loss" and "bpb", equally long; NaN where the log does not say
    last, best  the windows of the newest and of the best validation; None where they were not kept
    message  how it failed
    """

    folder: Path
    seed: int
    state: str
    summary: dict | None
    planned: dict
    curve: dict[str, np.ndarray]
    last: Windows | None
    best: Windows | None
    message: str = ""


@dataclass(frozen=True)
class Variant:
    """Values of the swept keys, and the runs in order of their seeds, one for each."""

    values: dict[str, object]
    label: str
    runs: tuple[Run, ...]

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.state == "finished")


@dataclass(frozen=True)
class Sweep:
    """keys: the swept ones, without the seed. The baseline is one of the variants."""

    folder: Path
    keys: tuple[str, ...]
    variants: tuple[Variant, ...]
    baseline: Variant


def read_sweep(folder: str | Path, baseline: str | None = None) -> Sweep:
    """The sweep in a folder, or all runs below one without sweep.json: there the settings in which they differ are the swept keys.

    baseline  a variant's label, or values of swept keys, such as "model.n_heads=4" or "n_heads=4,window=64"; None: the variant that has the
              most of the settings that would hold without the sweep (of a folder without sweep.json: the first)

    Of two runs of one variant with one seed the newest finished one counts, or the newest if none is finished. Raises FileNotFoundError
    where there is no run, ValueError for a file that cannot be read and for a baseline that is no variant.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder; name that of a sweep, such as multirun/DATE/TIME")
    keys, cells, standing = _indexed(folder) if (folder / SWEEP).is_file() else _found(folder)
    if not cells:
        raise FileNotFoundError(
            f"{folder} holds neither cells in {SWEEP} nor a run with {CONFIG}; name that of a sweep or one with runs"
        )
    variants: dict[tuple[str, ...], tuple[dict, dict[int, Run]]] = {}
    for values, run in cells:
        _, runs = variants.setdefault(tuple(map(text_of, values.values())), (values, {}))
        runs[run.seed] = max(runs.get(run.seed, run), run, key=_precedence)
    labels = label_keys(keys)
    every = [
        Variant(values, label_of(values, labels), tuple(runs[seed] for seed in sorted(runs)))
        for values, runs in variants.values()
    ]
    return Sweep(folder, keys, tuple(every), _choose(every, labels, baseline, standing))


def _indexed(folder: Path) -> tuple[tuple[str, ...], list[tuple[dict, Run]], dict]:
    """Swept keys, values and run of each cell, and the values that would hold without the sweep, by sweep.json."""
    index = _read_json(folder / SWEEP)
    try:
        keys, standing = tuple(index["swept"]), dict(index["baseline"])
        cells = [
            ({key: cell["values"][key] for key in keys}, folder / cell["folder"], int(cell["seed"]), cell)
            for cell in index["cells"]
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / SWEEP} is no list of cells ({error!r}); restore it, or remove it to read the runs below"
        ) from error
    return keys, [(values, read_run(*cell)) for values, *cell in cells], standing


def _found(folder: Path) -> tuple[tuple[str, ...], list[tuple[dict, Run]], dict]:
    """The same, by the config.yaml of each run below the folder; the variants in the order of their values."""
    configs = {}
    for place, below, files in os.walk(folder):
        below.sort()
        if CONFIG in files and (config := _read_config(Path(place) / CONFIG)):
            configs[Path(place)] = config
            below.clear()  # loggers keep a config.yaml of their own inside a run
    names = dict.fromkeys(
        key for config in configs.values() for key in config if key.partition(".")[0] not in NO_SETTINGS
    )
    keys = tuple(
        key for key in names if len({text_of(config[key]) for config in configs.values() if key in config}) > 1
    )
    cells = [
        ({key: config.get(key, ABSENT) for key in keys}, read_run(place, config["seed"]))
        for place, config in configs.items()
    ]
    return keys, sorted(cells, key=lambda cell: [_order(cell[0][key]) for key in keys]), {}


def _read_config(path: Path) -> dict[str, object] | None:
    """Dotted keys and values; None where it is not that of a run."""
    import yaml

    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as yaml ({error}); move that run away") from error
    if not isinstance(config, dict) or not isinstance(config.get("seed"), int) or "model" not in config:
        return None
    return dict(_flat(config))


def _flat(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        yield from _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def read_run(folder: Path, seed: int, planned: Mapping[str, object] | None = None) -> Run:
    """What lies in a run's folder, in whatever state. Raises ValueError for a file that cannot be read."""
    state = state_of(folder)
    return Run(
        folder,
        seed,
        state,
        _read_json(folder / SUMMARY) if state == "finished" else None,
        dict(planned or {}),
        read_curve(folder),
        _read_windows(folder / "windows_last.npz"),
        _read_windows(folder / "windows_best.npz"),
        message=str(_read_json(folder / FAILURE).get("message", "")) if state == "failed" else "",
    )


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable as json ({error}); restore it, or move it away") from error


def _read_windows(path: Path) -> Windows | None:
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            return Windows(int(arrays["step"]), int(arrays["context_length"]), arrays["nll"], arrays["targets"])
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} does not hold the losses of windows ({error}); remove it, or train that run anew"
        ) from error


def read_curve(folder: Path) -> dict[str, np.ndarray]:
    """A run's validations by its log, see `Run`; empty arrays without one.

    Every time that a run is resumed it begins a log of its own: from the first step of that one to its last, it replaces the older ones.
    Runs of an older version numbered a validation by the step before it and did not log its tokens: they follow from the training rows.
    """
    rows: dict[int, dict[str, float]] = {}
    for file in sorted(
        folder.glob("csv/version_*/metrics.csv"), key=lambda file: int(file.parent.name.partition("_")[2])
    ):
        whole_lines = file.read_text(encoding="utf-8").rpartition("\n")[
            0
        ]  # the last one may be in the course of being written
        newer: dict[int, dict[str, float]] = {}
        for row in csv.DictReader(io.StringIO(whole_lines)):
            if row.get("step"):
                seen = {name: float(row[column]) for name, column in COLUMNS.items() if row.get(column)}
                newer.setdefault(int(row["step"]), {}).update(seen)
        if newer:
            rows = {step: row for step, row in rows.items() if not min(newer) <= step <= max(newer)} | newer
    per_step = [row["tokens"] / step for step, row in rows.items() if step > 0 and "tokens" in row]
    for step, row in rows.items():
        if "loss" in row and "tokens" not in row and per_step:
            row["tokens"] = per_step[-1] * min(step + 1, max(rows))
    steps = sorted(step for step, row in rows.items() if "loss" in row)
    curve = {name: np.array([rows[step].get(name, math.nan) for step in steps], float) for name in COLUMNS}
    return {"step": np.array(steps, np.int64)} | curve


def _precedence(run: Run) -> tuple:
    """Larger for the run that is to count."""
    times = [path.stat().st_mtime_ns for path in (run.folder / SUMMARY, run.folder / CONFIG) if path.is_file()]
    return run.state == "finished", max(times, default=0), str(run.folder)


def text_of(value: object) -> str:
    """As one writes it on the command line."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _order(value: object) -> tuple:
    """Numbers by size, then everything else by name."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, value, "") if number else (1, 0, text_of(value))


def label_keys(keys: Sequence[str]) -> dict[str, str]:
    """Each key and the name it has in labels: its last component, where no other one ends in the same."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last)}


def label_of(values: Mapping[str, object], labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text_of(values[key])}" for key, name in labels.items()) or "the configuration"


def _choose(
    variants: Sequence[Variant], labels: Mapping[str, str], asked: str | None, standing: Mapping[str, object]
) -> Variant:
    """The baseline. Raises ValueError that lists the labels."""

    def agreeing(variant: Variant) -> int:
        return sum(
            key in standing and text_of(standing[key]) == text_of(value) for key, value in variant.values.items()
        )

    if asked is None:
        return max(variants, key=agreeing)  # of several the first
    wanted = dict(
        part.strip().partition("=")[::2] for part in re.split(r",(?=[^,=]+=)", asked)
    )  # a list has commas, but no = behind them
    keys = {name: key for key, label in labels.items() for name in (key, label)}
    fitting = [v for v in variants if v.label == asked.strip()] or [
        v
        for v in variants
        if all(name in keys and text_of(v.values[keys[name]]) == text for name, text in wanted.items())
    ]
    fitting = [v for v in fitting if agreeing(v) == max(map(agreeing, fitting))]
    if len(fitting) != 1:
        what = "fits several variants" if fitting else "is no variant"
        raise ValueError(
            f"baseline={asked} {what}; choose one of: {'; '.join(variant.label for variant in fitting or variants)}"
        )
    return fitting[0]


def compare_with_baseline(sweep: Sweep, which: str = "final") -> dict[str, Comparison]:
    """label -> comparison of each other variant with the baseline, by the "final" or the "best" validation; together they are one family.

    Of finished runs, paired by seed and by validation window. Windows of other lengths are put together to the shortest spans of text that
    are whole windows of all. Where text or tokenizer differ, or no single windows were kept, bits per byte of the whole are paired by seed
    alone, and the remark says so.
    """
    others = [variant for variant in sweep.variants if variant is not sweep.baseline]
    return {variant.label: _compare(variant, sweep.baseline, which, len(others)) for variant in others}


def _compare(variant: Variant, baseline: Variant, which: str, n_comparisons: int) -> Comparison:
    sides = [{run.seed: run for run in side.finished} for side in (variant, baseline)]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    runs = [side[seed] for side in sides for seed in seeds]
    paired, unit, remarks = _paired(runs, WINDOWS_OF[which]), Comparison.unit, []
    if isinstance(paired, str):
        remarks.append(f"Compared as a whole, by seed alone: {paired}.")
        paired, unit = ([np.array([run.summary[f"{which}_val_bpb"]]) for run in runs], np.ones(1)), "bits per byte"
    losses, weights = paired
    found = compare(
        dict(zip(seeds, losses)), dict(zip(seeds, losses[len(seeds) :])), weights, n_comparisons=n_comparisons
    )
    if left_out := sorted({run.seed for side in (variant, baseline) for run in side.runs} - set(seeds)):
        remarks.append(f"Left out, because not finished in both: seed {', '.join(map(str, left_out))}.")
    return replace(found, remark=" ".join(filter(None, [found.remark, *remarks])), unit=unit)


def _paired(runs: Sequence[Run], which: str) -> tuple[list[np.ndarray], np.ndarray] | str:
    """Mean loss of each span of text (N,) in each run, and the targets of each span (N,); or why their windows cannot be paired."""
    if not runs:
        return [], np.ones(1)
    windows, texts = [getattr(run, which) for run in runs], {run.summary.get("data_fingerprint") for run in runs}
    if None in windows:
        return "the losses of single windows were not kept"
    if None in texts or len(texts) > 1:
        return "their text or tokenizer differ, or were not recorded"
    length = math.lcm(*(its.context_length for its in windows))
    starts = [np.arange(0, len(its.nll), length // its.context_length) for its in windows]
    nll, targets = (
        [np.add.reduceat(getattr(its, name), at) for its, at in zip(windows, starts)] for name in ("nll", "targets")
    )
    if any(not np.array_equal(row, targets[0]) for row in targets):
        return "their windows do not cover the same text"
    return [row / targets[0] for row in nll], targets[0]
