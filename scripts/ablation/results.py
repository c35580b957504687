"""A sweep on disk: its variants, their runs and the baseline.

A variant is a configuration without its seed: the runs of a variant differ in their seed alone.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tril.model.runs import SUMMARY, SWEEP
from tril.scripts.ablation.run_files import CONFIG, Run, check_same_validation, read_config, read_run
from tril.scripts.ablation.sweep_files import read_json

NO_VARIANT = ("seed", "output_dir", "resume", "sweep", "callbacks", "logger")  # settings that do not define a variant
ABSENT = "absent"  # value of a swept key that a run of an older version does not have
RENAMED_VALUES = {"model.qk_norm": {"true": "rmsnorm", "false": "none"}}  # of older versions, as on the command line


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
        """An entry of summary.json of the finished runs that have it."""
        return [run.summary[name] for run in self.finished if run.summary and run.summary.get(name) is not None]


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        keys: the swept keys without the seed.
        index: the content of sweep.json, with "command", "stages" and "tune" where they were recorded; {} without it.
    """

    folder: Path
    keys: tuple[str, ...]
    variants: tuple[Variant, ...]
    baseline: Variant
    index: dict = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        return [run for variant in self.variants for run in variant.runs]

    @property
    def summaries(self) -> list[dict]:
        return [run.summary for run in self.runs if run.summary is not None]


def read_sweep(folder: str | Path, baseline: str | None = None) -> Sweep:
    """Reads a sweep by its sweep.json, or else all runs below the folder: the settings in which they differ are swept.

    Of two runs of one variant and seed, the newest finished one counts, or the newest if none is finished.

    Args:
        folder: of the sweep.
        baseline: a variant's label, or values of swept keys, such as "model.n_heads=4" or "n_heads=4,window=64".
            None: the variant that agrees most with the settings without the sweep; without sweep.json, the first one.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: a damaged file, runs that scored other parts of the validation part, or a baseline that is not a
            variant.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; name that of a sweep, such as multirun/DATE/TIME")
    index = read_json(folder / SWEEP) if (folder / SWEEP).is_file() else None
    keys, found, defaults = _discovered_runs(folder) if index is None else _indexed_runs(folder, index)
    if not found:
        raise FileNotFoundError(
            f"{folder} holds neither a {SWEEP} with runs nor a run with {CONFIG}; name the folder of a sweep"
        )
    variants: dict[tuple[str, ...], tuple[dict, dict[int, Run]]] = {}
    for values, run in found:
        _, runs = variants.setdefault(tuple(map(text_of, values.values())), (values, {}))
        runs[run.seed] = max(runs.get(run.seed, run), run, key=_precedence)
    check_same_validation(run for _, runs in variants.values() for run in runs.values())
    names = label_names(keys)
    every = [
        Variant(values, label_of(values, names), tuple(runs[seed] for seed in sorted(runs)))
        for values, runs in variants.values()
    ]
    return Sweep(folder, keys, tuple(every), _choose_baseline(every, names, baseline, defaults), index or {})


def _indexed_runs(folder: Path, index: dict) -> tuple[tuple[str, ...], list[tuple[dict, Run]], dict]:
    """Swept keys, values and run of each entry of sweep.json, and the values that hold without the sweep."""
    try:
        keys = tuple(index["swept"])
        defaults = {key: renamed(key, value) for key, value in dict(index["baseline"]).items()}
        values = [{key: renamed(key, entry["values"][key]) for key in keys} for entry in index["cells"]]
        folders = [(folder / entry["folder"], int(entry["seed"])) for entry in index["cells"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / SWEEP} is not a list of runs ({error!r}); restore it, or remove it to read the runs below"
        ) from error
    runs = [read_run(path, seed, entry) for (path, seed), entry in zip(folders, index["cells"], strict=True)]
    return keys, list(zip(values, runs, strict=True)), defaults


def _discovered_runs(folder: Path) -> tuple[tuple[str, ...], list[tuple[dict, Run]], dict]:
    """The same from the config.yaml of each run below the folder, variants in the order of their values."""
    configs: dict[Path, dict] = {}
    for path, subfolders, files in os.walk(folder):
        subfolders.sort()
        if CONFIG in files and (config := read_config(Path(path) / CONFIG)):
            configs[Path(path)] = {key: renamed(key, value) for key, value in config.items()}
            subfolders.clear()  # loggers save a config.yaml of their own within a run
    every_key = dict.fromkeys(key for config in configs.values() for key in config)
    keys = tuple(
        key
        for key in every_key
        if key.partition(".")[0] not in NO_VARIANT
        and len({text_of(config[key]) for config in configs.values() if key in config}) > 1
    )
    found = [
        ({key: config.get(key, ABSENT) for key in keys}, read_run(path, config["seed"]))
        for path, config in configs.items()
    ]
    return keys, sorted(found, key=lambda item: [_order(item[0][key]) for key in keys]), {}


def _precedence(run: Run) -> tuple:
    """Of two runs of one variant and seed, the one with the larger value counts."""
    times = [path.stat().st_mtime_ns for path in (run.folder / SUMMARY, run.folder / CONFIG) if path.is_file()]
    return run.state == "finished", max(times, default=0), str(run.folder)


def text_of(value: object) -> str:
    """A value as it is typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def renamed(key: str, value: object) -> object:
    """The value as this version writes it."""
    return RENAMED_VALUES.get(key, {}).get(text_of(value), value)


def _order(value: object) -> tuple:
    """Sort key: numbers by size, then everything else by name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return (0, value, "")
    return (1, 0, text_of(value))


def label_names(keys: Sequence[str]) -> dict[str, str]:
    """The name of each key in labels: its last component if that is unique."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)}


def label_of(values: Mapping[str, object], names: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={text_of(values[key])}" for key, name in names.items()) or "the configuration"


def _choose_baseline(
    variants: Sequence[Variant], names: Mapping[str, str], asked: str | None, defaults: Mapping[str, object]
) -> Variant:
    """Raises ValueError that lists the labels."""

    def agreement(variant: Variant) -> int:
        return sum(
            key in defaults and text_of(defaults[key]) == text_of(value) for key, value in variant.values.items()
        )

    if asked is None:
        return max(variants, key=agreement)  # the first of several
    # a comma within a list is not followed by "key="
    parts = [part.strip().partition("=") for part in re.split(r",(?=[^,=]+=)", asked)]
    wanted = {name: text for name, _, text in parts}
    keys = {name: key for key, label in names.items() for name in (key, label)}
    matching = [variant for variant in variants if variant.label == asked.strip()] or [
        variant
        for variant in variants
        if all(
            name in keys and text_of(variant.values[keys[name]]) == renamed(keys[name], text)
            for name, text in wanted.items()
        )
    ]
    matching = [variant for variant in matching if agreement(variant) == max(map(agreement, matching))]
    if len(matching) != 1:
        problem = "matches several variants" if matching else "is not a variant"
        labels = "; ".join(variant.label for variant in matching or variants)
        raise ValueError(f"baseline={asked} {problem}; choose one of: {labels}")
    return matching[0]
