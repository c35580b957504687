"""What the contract tests know of Tril: its commands, and the files that they leave.

The only module of this folder that imports a module of Tril by its name; `test_imports.py` checks the others.
"""

import contextlib
import csv
import importlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
COMMANDS = ("train", "sample", "play", "export", "heads", "evaluate", "certify", "report", "referee")
TINY = (  # a run of one second
    "data.tokenizer.vocab_size=300",
    "data.batch_size=4",
    "model.context_length=32",
    "model.n_layers=2",
    "model.dim=32",
    "model.n_heads=2",
    "trainer.max_steps=8",
    "trainer.val_check_interval=4",
    "trainer.log_every_n_steps=1",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "optim.schedule.warmup_steps=2",
    "callbacks.samples.max_new_tokens=8",
)
BARE = ("~callbacks.samples", "~callbacks.heads", "~callbacks.causality")  # without what a run does besides training


@dataclass(frozen=True)
class Done:
    """An ended command."""

    status: int
    out: str
    err: str

    def succeeded(self) -> "Done":
        assert self.status == 0, self.err[-3000:]
        return self


def run(name: str, *arguments: object, cwd: Path, **environment: str) -> Done:
    """`python NAME.py ARGUMENTS` in the folder `cwd`, in this process; `environment` holds variables to set."""
    from hydra.core.global_hydra import GlobalHydra

    assert name in COMMANDS
    main = importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}").main
    script = "train.py" if name == "train" else f"scripts/{name}.py"
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.object(sys, "argv", [script, *map(str, arguments)]),
        mock.patch.dict(os.environ, {"TRIL_CACHE": str(cwd / "cache"), **environment}),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
        _same_logging(),
    ):
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            traceback.print_exc()
            status = 1
        finally:
            GlobalHydra.instance().clear()  # Hydra keeps the configuration of a process
    return Done(status, *(stream.buffer.getvalue().decode() for stream in (out, err)))


@contextlib.contextmanager
def _same_logging():
    """Hydra configures logging for a whole process."""
    root, level, handlers = logging.root, logging.root.level, logging.root.handlers[:]
    disabled = {x: x.disabled for x in root.manager.loggerDict.values() if isinstance(x, logging.Logger)}
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
        for logger, value in disabled.items():
            logger.disabled = value


def start(name: str, *arguments: object, cwd: Path, **environment: str) -> subprocess.Popen:
    """`python NAME.py ARGUMENTS` as a new process, with pipes for stdout and stderr."""
    script = ROOT / ("train.py" if name == "train" else f"scripts/{name}.py")
    variables = {"TRIL_CACHE": str(cwd / "cache"), "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **environment}
    return subprocess.Popen(
        [sys.executable, script, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def process(name: str, *arguments: object, cwd: Path, timeout: float = 240, **environment: str) -> Done:
    """`python NAME.py ARGUMENTS` as a new process, to its end."""
    started = start(name, *arguments, cwd=cwd, **environment)
    try:
        out, err = started.communicate(timeout=timeout)
    finally:
        started.kill()
    return Done(started.returncode, out, err)


def train_run(*settings: object, cwd: Path, base: Sequence = (*TINY, *BARE), start: Callable = run, **others) -> Path:
    """Trains in the folder `cwd`, which may be new, with settings that replace those of `base`; returns the run's."""
    cwd.mkdir(parents=True, exist_ok=True)
    start("train", *merged(base, *settings), cwd=cwd, **others).succeeded()
    return newest_run(cwd)


def merged(base: Sequence, *overrides: object) -> list[str]:
    """The settings, of each key the last one; `~a.b` goes if a.b is set again, and a tokenizer's size with its kind."""
    settings = {}
    for setting in (*base, *map(str, overrides)):
        key = setting.partition("=")[0].lstrip("+")
        settings.pop(f"~{key.rpartition('.')[0]}", None)
        if key == "data.tokenizer.kind":
            settings.pop("data.tokenizer.vocab_size", None)
        settings[key] = setting
    return list(settings.values())


def newest_run(cwd: Path) -> Path:
    """The newest folder of a run below outputs/."""
    folders = [path.parent for path in cwd.glob("outputs/**/config.yaml")]
    assert folders, f"no run below {cwd}/outputs"
    return max(folders, key=lambda folder: (folder / "config.yaml").stat().st_mtime_ns)


def summary(folder: Path) -> dict:
    """The content of summary.json."""
    return json.loads((folder / "summary.json").read_text("utf-8"))


def metrics(folder: Path, name: str) -> dict[int, float]:
    """The values of one column of metrics.csv: optimizer step -> value."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def table(name: str, columns: int) -> list[list[str]]:
    """The rows of a file of this folder, whose cells a vertical bar separates; lines with # are comments."""
    lines = Path(__file__).with_name(name).read_text("utf-8").splitlines()
    rows = [line.split(" | ", columns - 1) for line in lines if line and line[0] != "#"]
    return [[cell.strip() for cell in row] for row in rows]


def copy_project(folder: Path) -> Path:
    """Copies the project, without hidden and built files, to the new folder."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun", "build", "*.egg-info", "shared")
    return shutil.copytree(ROOT, folder, ignore=skipped)


def assert_refused(done: Done, *parts: str) -> None:
    """A user's mistake: status 2, and one line on stderr that contains the parts."""
    assert done.status == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1, done
    assert all(part in done.err for part in parts), (parts, done.err)


def assert_golden(area: str, name: str, value: object) -> None:
    """Compares with the entry `name` of golden/AREA.json: numbers within 1e-5 (so counts exactly), all else exactly.

    With TRIL_GOLDEN=write in the environment, it writes the entry instead.
    """
    path = GOLDEN / f"{area}.json"
    content = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    if os.environ.get("TRIL_GOLDEN") == "write":
        content[name] = value
        path.write_text(json.dumps(dict(sorted(content.items())), indent=1, ensure_ascii=False) + "\n", "utf-8")
    assert name in content, f"golden/{area}.json has no {name}: write it with TRIL_GOLDEN=write, without xdist"
    assert value == pytest.approx(content[name], rel=1e-5)
