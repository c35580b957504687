"""Where runs are stored: one folder each, below outputs/ (single runs) and multirun/ (sweeps) of the working directory.

This module does not import torch, so that an entry point can check paths before it loads anything.
"""

import contextlib
import csv
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    import torch

    from tril.model.checkpoint import LanguageModel

ROOTS = ("outputs", "multirun")
CHECKPOINTS = "checkpoints"  # the folder in that of a run, with the next three files
LAST, PREVIOUS, BEST = "last.ckpt", "previous.ckpt", "best.ckpt"
SETTINGS = "config.yaml"  # written when a run starts
SUMMARY = "summary.json"  # written last: a run with this file is finished
FAILURE = "failed.json"  # how a run of a sweep failed
SWEEP = "sweep.json"  # the runs of a sweep, in its folder
METRICS = "csv/version_0/metrics.csv"
LOCK = ".run.lock"  # held while a process trains the run
MAX_BYTES, MAX_DEPTH = 2**20, 50  # of config.yaml, which has 4 kB


@dataclass(frozen=True)
class Run:
    """The folder of a run and what is in its files, which are read at each access."""

    folder: Path

    @classmethod
    def find(cls, name: str | Path = "latest") -> "Run":
        """The run that a user means.

        Args:
            name: its folder, a file in it, or "latest": the one below outputs/ and multirun/ that was started or
                resumed last. "~" is expanded.

        Raises:
            FileNotFoundError: there is none.
        """
        if str(name) == "latest":
            return cls(newest_run())
        path = _expanded(name)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; name a run's folder, a file in it, or latest")
        return cls(path if path.is_dir() else run_folder(path))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the run: the content of config.yaml. Raises ValueError for a damaged one."""
        settings = read_settings(self.folder / SETTINGS)
        if not isinstance(settings, dict):
            raise ValueError(f"{self.folder / SETTINGS} does not have the settings of a run; restore it")
        return settings

    @property
    def config(self) -> Any:
        """The same with attributes, as in `run.config.model.n_heads`."""
        return Settings(self.settings)

    @property
    def summary(self) -> dict[str, Any]:
        """The results: the content of summary.json. Raises ValueError for a damaged one."""
        path = self.folder / SUMMARY
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read ({error}); restore it") from error

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each without its empty cells. "step" is an int.

        A step has a row for each kind of metrics, such as "train/loss" or "val/loss".

        Raises:
            ValueError: a damaged file.
        """
        path = self.folder / METRICS
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [{key: float(text) for key, text in row.items() if text} for row in csv.DictReader(file)]
            return [row | {"step": int(row["step"])} for row in rows]
        except (ValueError, TypeError, KeyError, OverflowError, csv.Error) as error:
            raise ValueError(f"{path} cannot be read ({error}); restore it") from error

    @property
    def state(self) -> Literal["new", "started", "finished", "failed"]:
        """ "started" is running or interrupted."""
        if (self.folder / SUMMARY).is_file():
            return "finished"
        if (self.folder / FAILURE).is_file():
            return "failed"
        return "started" if (self.folder / SETTINGS).is_file() else "new"

    def checkpoint(self, prefer: tuple[str, ...] = ("best", "last")) -> Path:
        """The first of these checkpoints that exists. Raises FileNotFoundError if none does."""
        return find_checkpoint(self.folder, prefer=prefer)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """No other process trains the run in the block. A file system may have no locks.

        Raises:
            ValueError: another process trains it.
        """
        import filelock

        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(filelock.FileLock(self.folder / LOCK, timeout=0))
            except filelock.Timeout as error:
                remedy = "wait for its end, or stop it"
                raise ValueError(f"another process trains the run in {self.folder}; {remedy}") from error
            except NotImplementedError:  # the file system has no locks
                pass
            yield

    def load(self, device: "torch.device | str" = "cpu") -> "LanguageModel":
        """The model of the best validation with its tokenizer, in evaluation mode; see `tril.model.load`."""
        from tril.model.checkpoint import load

        return load(self.folder, device)


class Settings(Mapping):
    """Nested plain values that are read as attributes or as items, and cannot be changed."""

    def __init__(self, values: dict[str, Any]):
        vars(self)["values"] = values

    def __getitem__(self, key: str) -> Any:
        value = vars(self)["values"][key]
        return Settings(value) if isinstance(value, dict) else value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no setting {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the settings of a run are read-only, and {name} is one of them")

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self)["values"])

    def __len__(self) -> int:
        return len(vars(self)["values"])


class _Loader(yaml.SafeLoader):
    """Refuses what Tril never writes, and reads 1e-3 as a number, which YAML 1.1 does not."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) or self.depth == MAX_DEPTH:
            problem = f"an alias, a tag, or more than {MAX_DEPTH} levels"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


DIGITS = r"\d[\d_]*"
FLOAT = rf"([-+]?({DIGITS}\.[\d_]*|\.{DIGITS})([eE][-+]?\d+)?|[-+]?{DIGITS}[eE][-+]?\d+|[-+]?\.(inf|INF)|\.(nan|NAN))$"
_Loader.yaml_implicit_resolvers = {  # dates are texts, as in OmegaConf
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":timestamp", ":float"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(FLOAT), list("-+0123456789."))


def read_settings(path: Path) -> Any:
    """The content of a config.yaml as plain values. Raises ValueError for a damaged one."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        return yaml.load(content.decode("utf-8"), _Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = " ".join(str(error).split()).replace(' in "<unicode string>",', ",")
        raise ValueError(f"{path} cannot be read ({problem}); restore it") from error


def find_checkpoint(path: str | Path, *, prefer: tuple[str, ...] = ("best", "last")) -> Path:
    """Finds the checkpoint file that a user means.

    Args:
        path: a file, the folder of a run, or "latest": the newest run below outputs/ and multirun/. "~" is expanded.
        prefer: names of checkpoints; the first that exists in a folder is taken.

    Raises:
        FileNotFoundError: there is none.
    """
    if str(path) == "latest":
        files = [file for root in ROOTS for name in prefer for file in Path(root).rglob(f"{CHECKPOINTS}/{name}.ckpt")]
        if not files:
            roots = " or ".join(f"{root}/" for root in ROOTS)
            raise FileNotFoundError(f"no checkpoint below {roots} of {Path.cwd()}; train first, or name a file")
        path = run_folder(_newest(files))
    path = _expanded(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist; name a checkpoint file, a run's folder or latest")
    names = [f"{CHECKPOINTS}/{name}.ckpt" for name in prefer] + [f"{name}.ckpt" for name in prefer]
    for name in names:
        if (path / name).is_file():
            return path / name
    expected = " or ".join(names[: len(prefer)])
    raise FileNotFoundError(f"{path} contains no {expected}; name a checkpoint file or a run's folder")


def newest_run() -> Path:
    """The folder of the run below outputs/ and multirun/ that was started or resumed last, with or without checkpoint.

    Raises:
        FileNotFoundError: there is none.
    """
    if not (files := [file for root in ROOTS for file in Path(root).rglob(SETTINGS)]):
        roots = " or ".join(f"{root}/" for root in ROOTS)
        raise FileNotFoundError(f"no run below {roots} of {Path.cwd()}; train first, or name the folder of a run")
    return _newest(files).parent


def find_sweep(path: str) -> Path:
    """Finds the folder of a sweep.

    Args:
        path: the folder, in which "~" is expanded, or "latest": the one below multirun/ with the newest sweep.json.

    Raises:
        FileNotFoundError: "latest" finds none.
    """
    if path != "latest":
        return _expanded(path)
    root = ROOTS[1]
    if not (files := list(Path(root).rglob(SWEEP))):
        message = f"no {SWEEP} below {root}/ of {Path.cwd()}; start a sweep (python train.py -m ...), or name a folder"
        raise FileNotFoundError(message)
    return _newest(files).parent


def _expanded(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))  # unlike Path.expanduser, it leaves the home of an unknown user unchanged


def _newest(files: Iterable[Path]) -> Path:
    return max(files, key=lambda file: file.stat().st_mtime)


def run_folder(checkpoint: Path) -> Path:
    """The folder of the run that wrote a checkpoint file."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else checkpoint.parent


def new_folder(root: str) -> Path:
    """Creates root/DATE/TIME for the current time, with a suffix where another run started in the same second."""
    now, number = datetime.now(), 1
    while True:
        suffix = f"-{number}" if number > 1 else ""
        folder = Path(root, f"{now:%Y-%m-%d}", f"{now:%H-%M-%S}{suffix}")
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1


def state_of(folder: str | Path) -> str:
    """State of a run: finished, failed, unfinished (running or interrupted) or not started."""
    folder = Path(folder)
    if (folder / SUMMARY).is_file():
        return "finished"
    if (folder / FAILURE).is_file():
        return "failed"
    return "unfinished" if folder.is_dir() else "not started"


def partial_validation(windows: dict[str, int] | None) -> str | None:
    """Such as "16 of 1,110 windows", if not the whole validation part was scored.

    Args:
        windows: `val_windows` of a summary.json; None: a run of an older version.
    """
    if windows is None or windows["scored"] == windows["of"]:
        return None
    return f"{windows['scored']:,} of {windows['of']:,} windows"


def relocate(value: Any, old: str, new: str) -> Any:
    """A copy of the plain containers in `value` in which every path in folder `old` points to folder `new`."""
    if isinstance(value, dict):
        return {relocate(key, old, new): relocate(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [relocate(item, old, new) for item in value]
    inside = isinstance(value, str) and (value == old or value.startswith(old + os.sep))
    return new + value[len(old) :] if inside else value


def remove_if_empty(folder: Path) -> None:
    """Removes the folder of a run if it is empty, and those above it that Hydra made below outputs/."""
    for path in (folder, *folder.parents[:2]):
        ours = path == folder or path.absolute().is_relative_to(Path(ROOTS[0]).absolute())
        if ours and path.is_dir() and not any(path.iterdir()):
            path.rmdir()
