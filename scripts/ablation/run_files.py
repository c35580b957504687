"""Reads the files of one run, finished or not: settings, summary, validation curve and losses of validation windows."""

import csv
import io
import math
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tril.model.runs import FAILURE, partial_validation, read_settings, state_of
from tril.scripts.ablation.sweep_files import read_json, read_summary
from tril.scripts.cli.config import flatten

CONFIG = "config.yaml"
# of the curve -> of a run's log
COLUMNS = {"tokens": "train/tokens", "seconds": "train/seconds", "loss": "val/loss", "bpb": "val/bpb"}


@dataclass(frozen=True)
class Windows:
    """Losses of one validation, for N windows and D documents in the order of the text.

    Attributes:
        nll: (N,) nats, summed over the targets of each window.
        targets: (N,) number of targets of each window.
        document_nll: (D,) nats, summed over the targets of each document; None for a run of an older version.
        document_targets: (D,) number of targets of each document; None for a run of an older version.
    """

    step: int
    context_length: int
    nll: np.ndarray
    targets: np.ndarray
    document_nll: np.ndarray | None = None
    document_targets: np.ndarray | None = None


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        state: finished, failed, unfinished or not started.
        summary: the content of summary.json; None unless finished.
        planned: its entry of sweep.json; {} without one.
        curve: "step", "tokens", "seconds", "loss" and "bpb" of its validations, equally long; NaN if not logged.
        last: windows of the last validation; None if not saved, or if the run diverged after that validation.
        best: windows of the best validation; None if not saved.
        message: the error of a failed run.
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


def read_run(folder: Path, seed: int, planned: Mapping[str, object] | None = None) -> Run:
    """Reads a run's folder in any state. Raises ValueError for a damaged file."""
    state = state_of(folder)
    summary = read_summary(folder) if state == "finished" else None
    stopped = summary is not None and summary.get("diverged") is not None
    return Run(
        folder,
        seed,
        state,
        summary,
        dict(planned or {}),
        read_curve(folder),
        None if stopped else _read_windows(folder / "windows_last.npz"),
        _read_windows(folder / "windows_best.npz"),
        message=str(read_json(folder / FAILURE).get("message", "")) if state == "failed" else "",
    )


def check_same_validation(runs: Iterable[Run]) -> str | None:
    """How much of the validation part all finished runs have scored, such as "16 of 1,110 windows"; None: all of it.

    Raises:
        ValueError: trainer.limit_val_batches has shortened it for some, and not in the same way for all.
    """
    summaries = {run.folder: run.summary for run in runs if run.summary is not None}
    parts = {folder: partial_validation(summary.get("val_windows")) for folder, summary in summaries.items()}
    shortened = next((folder for folder, part in parts.items() if part is not None), None)
    if shortened is None:
        return None
    for folder, part in parts.items():
        if part != parts[shortened]:
            cause = f"has scored {parts[shortened]} of its validation part and {folder} {part or 'all'}"
            raise ValueError(f"{shortened} {cause}; train them with the same trainer.limit_val_batches")
    return parts[shortened]


def read_config(path: Path) -> dict[str, object] | None:
    """Dotted keys and values of a run's config.yaml; None if the file belongs to something else."""
    config = read_settings(path)
    if not isinstance(config, dict) or not isinstance(config.get("seed"), int) or "model" not in config:
        return None
    return flatten(config)


def _read_windows(path: Path) -> Windows | None:
    if not path.is_file():
        return None
    try:
        with np.load(path) as arrays:
            documents = {name: arrays[name] for name in ("document_nll", "document_targets") if name in arrays}
            step, context_length = int(arrays["step"]), int(arrays["context_length"])
            return Windows(step, context_length, arrays["nll"], arrays["targets"], **documents)
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it, or train that run again") from error


def read_curve(folder: Path) -> dict[str, np.ndarray]:
    """The validations in a run's log, see `Run`; empty arrays without a log.

    A resumed run starts another log, which replaces the earlier ones between its first and its last step. Older
    versions numbered a validation by the step before it and did not log its tokens; the training rows give them.
    """
    rows: dict[int, dict[str, float]] = {}
    logs = folder.glob("csv/version_*/metrics.csv")
    for log in sorted(logs, key=lambda log: int(log.parent.name.partition("_")[2])):
        newer = _read_log(log)
        if newer:
            rows = {step: row for step, row in rows.items() if not min(newer) <= step <= max(newer)} | newer
    per_step = [row["tokens"] / step for step, row in rows.items() if step > 0 and "tokens" in row]
    for step, row in rows.items():
        if "loss" in row and "tokens" not in row and per_step:
            row["tokens"] = per_step[-1] * min(step + 1, max(rows))
    steps = sorted(step for step, row in rows.items() if "loss" in row)
    curve = {name: np.array([rows[step].get(name, math.nan) for step in steps], float) for name in COLUMNS}
    return {"step": np.array(steps, np.int64)} | curve


def _read_log(path: Path) -> dict[int, dict[str, float]]:
    """The values of each step."""
    rows: dict[int, dict[str, float]] = {}
    complete_lines = path.read_text(encoding="utf-8").rpartition("\n")[0]  # the last line may be incomplete
    for row in csv.DictReader(io.StringIO(complete_lines)):
        if row.get("step"):
            values = {name: float(row[column]) for name, column in COLUMNS.items() if row.get(column)}
            rows.setdefault(int(row["step"]), {}).update(values)
    return rows
