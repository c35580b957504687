"""Where runs are stored: one folder each, below outputs/ (single runs) and multirun/ (sweeps) of the working directory.

This module does not import torch, so that an entry point can check paths before it loads anything.
"""

import contextlib
import csv
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import yaml

from tril.model.atomic_files import read_arrays, reading, write_text

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tril.model.generation.language_model import LanguageModel

ROOTS = ("outputs", "multirun")
CHECKPOINTS = "checkpoints"  # the folder in that of a run, with the next two files
LAST, BEST = "last.ckpt", "best.ckpt"
SETTINGS = "config.yaml"  # written when a run starts
SUMMARY = "summary.json"  # written last: a run with this file is finished
FAILURE = "failed.json"  # how a run of a sweep failed
SWEEP = "launches.jsonl"  # the commands of a sweep and their runs, in its folder
METRICS, WINDOWS = "csv/version_0/metrics.csv", "windows_last.npz"
FIGURES = (  # of a summary.json: numbers, or null
    *("final_val_loss", "final_val_bpb", "best_val_loss", "best_val_bpb", "parameters", "flops_per_token", "tokens"),
    *("tokens_per_second", "peak_memory_gb", "seconds", "val_bytes_per_token"),
)
LOCK = ".run.lock"  # held while a process trains the run
MAX_DEPTH = 20  # of a config.yaml


def load(path: str | Path = "latest", device: "torch.device | str" = "cpu") -> "LanguageModel":
    """Loads the model of a checkpoint, in evaluation mode, with its tokenizer.

    Weights of another floating-point precision are converted to float32.

    Args:
        path: a checkpoint file, the folder of a run, or "latest"; see `find_checkpoint`.

    Raises:
        OSError: there is no checkpoint.
        ValueError: the file is damaged or not a checkpoint, or its parts do not match.
    """
    from tril.model.checkpoint import Checkpoint

    return Checkpoint.read(find_checkpoint(path)).language_model(device)


@dataclass(frozen=True)
class Run:
    """The folder of a run and what is in its files, which are read at each access.

    A damaged file raises a ValueError that names it.
    """

    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run: the content of config.yaml."""
        return read_settings(self.folder / SETTINGS)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Writes config.yaml."""
        write_text(self.folder / SETTINGS, yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))

    @property
    def config(self) -> Any:
        """The same with attributes, as in `run.config.model.n_heads`."""
        return json.loads(json.dumps(self.settings), object_hook=lambda values: SimpleNamespace(**values))

    @property
    def summary(self) -> dict[str, Any]:
        """The results: the content of summary.json."""
        with reading(self.folder / SUMMARY) as path:
            summary = json.loads(path.read_text(encoding="utf-8"))
            figures, windows = map(summary.get, FIGURES), summary.get("val_windows") or {"scored": 0, "of": 0}
            required = (summary["final_val_loss"], summary["final_val_bpb"], windows["scored"], windows["of"])
            [math.fabs(x) for x in (*figures, *required) if x is not None]  # an error for what is no number
            hash(summary.get("data_fingerprint"))
            return summary

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each without its empty cells. "step" is an int.

        A step has a row for each kind of metrics, such as "train/loss" or "val/loss". The last line can be incomplete,
        where a full disk ended the run.
        """
        with reading(self.folder / METRICS) as path, path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(line for line in file if line.endswith("\n"))
            rows = [{key: float(text) for key, text in line.items() if text} for line in lines]
            return [row | {"step": int(row["step"])} for row in rows]

    @property
    def windows(self) -> "dict[str, np.ndarray] | None":
        """Losses of the last validation; None if they were not kept.

        For each of N windows, and of D documents in the order of the text: "nll", "targets", (N,), the sum of its
        losses in nats and its number of targets; "document_nll", "document_targets", (D,); "context_length".
        """
        if not (path := self.folder / WINDOWS).is_file():
            return None
        windows = read_arrays(path)
        with reading(path):
            pairs = [("nll", "targets"), ("document_nll", "document_targets")][: 1 + ("document_nll" in windows)]
            is_number = [x.dtype.kind in "iuf" and x.ndim < 2 for x in windows.values()]
            matching = [windows[a].shape == windows[b].shape for a, b in pairs]
            sizes = [windows[targets] for _, targets in pairs]
            is_text = [x.min(initial=0) >= 0 and 0 < x.sum() < math.inf for x in sizes if all(is_number)]
            if not all(is_number + matching + is_text) or int(windows["context_length"].item()) < 1:
                raise ValueError("its arrays are no numbers, do not match, or have no targets")
        return windows

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """No other process trains the run in the block, unless the file system has no locks.

        Raises:
            ValueError: another process trains it, or it has a link, through which the run would write elsewhere.
        """
        import filelock

        check_links(self.folder, "*", f"{CHECKPOINTS}/*", "csv/*", "csv/*/*")
        lock = filelock.FileLock(self.folder / LOCK, timeout=0)
        try:
            with contextlib.suppress(NotImplementedError):  # of a file system without locks
                lock.acquire()
        except filelock.Timeout as error:
            cause = f"another process trains the run in {self.folder}"
            raise ValueError(f"{cause}; wait for its end, or stop it") from error
        try:
            yield
        finally:
            lock.release()

    def load(self, device: "torch.device | str" = "cpu") -> "LanguageModel":
        """The model of the best validation with its tokenizer, in evaluation mode; see the function `load`."""
        return load(self.folder, device)


def check_links(folder: Path, *patterns: str) -> None:
    """Raises ValueError if a folder, which can come from somebody else, has a link at one of the glob patterns."""
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, through which the run would write elsewhere; copy what it names")


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a config.yaml as plain values. Raises ValueError for a damaged one."""
    with reading(path):
        text = path.read_text(encoding="utf-8")
        depth = 0
        for event in yaml.parse(text):  # 60 aliases can make 2^60 values, and deep lists take quadratic time
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise ValueError(f"it has an alias, or more than {MAX_DEPTH} levels")
        return dict(yaml.safe_load(text))


def find_checkpoint(path: str | Path, *, prefer: tuple[str, ...] = ("best", "last")) -> Path:
    """Finds the checkpoint file that a user means.

    Args:
        path: a file, the folder of a run, or "latest": the newest below outputs/ and multirun/. "~" is expanded.
        prefer: names of checkpoints; the first that exists in a folder is taken.

    Raises:
        FileNotFoundError: there is none.
    """
    if not str(path):
        raise FileNotFoundError("no checkpoint is named; name a checkpoint file, a run's folder or latest")
    names = [f"{CHECKPOINTS}/{name}.ckpt" for name in prefer]
    path = run_folder(newest("checkpoint", *names)) if str(path) == "latest" else Path(os.path.expanduser(path))
    for file in (path, *(path / name for name in names), *(path / f"{name}.ckpt" for name in prefer)):
        if file.is_file():
            return file
    problem = f"contains no {' or '.join(names)}" if path.is_dir() else "does not exist"
    raise FileNotFoundError(f"{path} {problem}; name a checkpoint file, a run's folder or latest")


def find_sweep(path: str) -> Path:
    """Finds the folder of a sweep: `path`, in which "~" is expanded, or "latest", the newest below multirun/.

    Raises:
        FileNotFoundError: "latest" finds none, or `path` is "".
    """
    if not path:
        raise FileNotFoundError("no sweep is named; name the folder of a sweep, below multirun/, or latest")
    return newest(SWEEP, SWEEP, roots=ROOTS[1:]).parent if path == "latest" else Path(os.path.expanduser(path))


def newest(what: str, *names: str, roots: tuple[str, ...] = ROOTS) -> Path:
    """The file that was written last, of those with one of the names below the roots; `what` it is, in the error.

    Raises:
        FileNotFoundError: there is none.
    """
    files = [file for root in roots for name in names for file in Path(root).rglob(name)]
    if not files:
        below = " or ".join(f"{root}/" for root in roots)
        raise FileNotFoundError(f"no {what} below {below} of {Path.cwd()}; train first, or name a folder")
    return max(files, key=lambda file: file.stat().st_mtime)


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that wrote a checkpoint file."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def new_folder(root: str) -> Path:
    """Creates root/DATE/TIME for the current time, with a suffix where another run started in the same second."""
    now, suffix = datetime.now(), ""
    while True:
        folder = Path(root, f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}{suffix}")
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            suffix = f"-{int(suffix[1:] or 1) + 1}"


def is_resumable(folder: Path) -> bool:
    """Whether a run has a checkpoint to go on from."""
    return (folder / CHECKPOINTS / LAST).is_file()


def state_of(folder: str | Path) -> str:
    """State of a run: finished, failed, unfinished (running or interrupted) or not started."""
    for file, state in ((SUMMARY, "finished"), (FAILURE, "failed")):
        if Path(folder, file).is_file():
            return state
    return "unfinished" if Path(folder).is_dir() else "not started"


def in_sweep(folder: str | Path) -> bool:
    """Whether a run belongs to a sweep."""
    return Path(folder).absolute().with_name(SWEEP).is_file()


def partial_validation(windows: dict[str, int] | None) -> str | None:
    """Such as "16 of 1,110 windows", if not the whole validation part was scored.

    Args:
        windows: `val_windows` of a summary.json; {}: there was no validation; None: unknown.
    """
    if not windows or windows["scored"] == windows["of"]:
        return None
    return f"{windows['scored']:,} of {windows['of']:,} windows"
