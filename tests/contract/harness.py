"""What the contract tests know of Tril: its commands, and the files that they leave.

The only module of this folder that names modules of Tril which are not public; `test_imports.py` checks the others.
"""

import contextlib
import csv
import gc
import importlib
import io
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes of `Command`
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
COMMANDS = ("train", "sample", "play", "export", "heads", "evaluate", "certify", "report", "referee")


def table(name: str, columns: int) -> list[list[str]]:
    """The rows of a file of this folder, whose cells a vertical bar separates; lines with # are comments."""
    lines = Path(__file__).with_name(name).read_text("utf-8").splitlines()
    rows = [line.split(" | ", columns - 1) for line in lines if line and line[0] != "#"]
    return [[cell.strip() for cell in row] for row in rows]


SETTINGS = {name: tuple(settings.split()) for name, settings in table("settings.txt", columns=2)}
TINY = SETTINGS["tiny"]  # a run of one second
BARE = (*TINY, *SETTINGS["bare"])  # and without what a run does besides training
FORKS = multiprocessing.get_context("forkserver")  # a fork of a process with threads may wait for ever
MODULES = {name: f"tril.{'' if name == 'train' else 'scripts.'}{name}" for name in COMMANDS}
LIBRARIES = "hydra lightning.pytorch matplotlib.pyplot pandas pyarrow pytest scipy.stats torch._dynamo".split()
FORKS.set_forkserver_preload([*LIBRARIES, "tril.model.causality", *MODULES.values()])


@dataclass(frozen=True)
class Done:
    """An ended command; the status of a killed one is negative."""

    status: int
    out: str
    err: str

    def succeeded(self) -> "Done":
        assert self.status == 0, self.err[-3000:]
        return self

    def refused(self, *parts: object) -> "Done":
        """A user's mistake: status 2, and one line on stderr that contains the parts."""
        assert self.status == 2 and self.err.startswith("error: ") and self.err.count("\n") == 1, self
        assert all(str(part) in self.err for part in parts), (parts, self.err)
        return self


class Command:
    """`python NAME.py ARGUMENTS` in the folder `cwd`, as a new process in which Tril is imported already.

    Args:
        before: is called in the process before the command.
        environment: variables to set.
    """

    def __init__(self, name: str, *arguments: object, cwd: Path, before: Callable | None = None, **environment: str):
        assert name in COMMANDS
        self.folder = TemporaryDirectory()
        self.files = [Path(self.folder.name, stream) for stream in ("out", "err")]
        for file in self.files:
            file.touch()
        variables = {"TRIL_CACHE": f"{cwd}/cache", **environment}
        options = (name, list(map(str, arguments)), cwd, self.files, before, variables)
        self.process = FORKS.Process(target=execute, args=options)
        self.process.start()

    def done(self, timeout: float = 240) -> Done:
        """Waits for its end."""
        self.process.join(timeout)
        assert self.process.exitcode is not None or self.process.kill(), "it does not end"
        return Done(self.process.exitcode, *(file.read_text("utf-8") for file in self.files))


def execute(name, arguments, cwd, files, before, variables) -> None:
    """What the new process does."""
    gc.freeze()  # a collection would look at everything that was imported before the fork
    os.environ |= variables
    os.chdir(cwd)
    sys.argv = [str(ROOT / f"{name}.py"), *arguments]  # Lightning starts a train.py for each other rank
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY), stream)
    if name == "train":  # loss.png takes a third of the time of a tiny run
        from matplotlib.figure import Figure
        from matplotlib.image import imsave

        Figure.savefig = lambda figure, path, **options: imsave(path, [[0.0]])
    if before is not None:
        before()
    importlib.import_module(MODULES[name]).main()


def run(*arguments, **options) -> Done:
    """A `Command`, to its end."""
    return Command(*arguments, **options).done()


def run_each(name: str, rows: Sequence[Sequence[str]], *, cwd: Path, **environment: str) -> list[Done]:
    """The command with each of these arguments, one after another in one process, which saves time."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "done.json"
        run(name, cwd=cwd, before=partial(execute_each, name, rows, file), **environment).succeeded()
        return [Done(*done) for done in json.loads(file.read_text("utf-8"))]


def execute_each(name: str, rows: Sequence[Sequence[str]], file: Path) -> None:
    """What its process does."""
    ended = []
    for arguments in rows:
        sys.argv, status = [f"{name}.py", *arguments], 0
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                importlib.import_module(MODULES[name]).main()
            except SystemExit as end:
                status = end.code
        ended.append((status, out.getvalue(), err.getvalue()))
    file.write_text(json.dumps(ended), "utf-8")
    sys.exit()


def train_run(*settings: object, cwd: Path, base: Sequence = BARE, **options) -> Path:
    """Trains in the folder `cwd`, which may be new, with settings that replace those of `base`; returns the run's."""
    cwd.mkdir(parents=True, exist_ok=True)
    run("train", *merged(base, *settings), cwd=cwd, **options).succeeded()
    return newest_run(cwd)


def merged(base: Sequence, *overrides: object) -> list[str]:
    """The settings, of each key the last one; `~a.b` goes if a.b or a part of it is set again.

    The size of a tokenizer goes if its kind is set. `-a.b` leaves out the setting a.b of the base.
    """
    settings = {}
    for setting in (*base, *map(str, overrides)):
        if setting.startswith("-"):
            del settings[setting[1:]]
            continue
        key = setting.partition("=")[0].lstrip("+")
        settings.pop(f"~{key.rpartition('.')[0]}", None)
        settings.pop(f"~{key}", None)
        if key == "data.tokenizer.kind":
            settings.pop("data.tokenizer.vocab_size", None)
        settings[key] = setting
    return list(settings.values())


def newest_run(cwd: Path) -> Path:
    """The newest folder of a run below outputs/."""
    return max(cwd.glob("outputs/**/config.yaml"), key=lambda path: path.stat().st_mtime_ns).parent


def summary(folder: Path) -> dict:
    """The content of summary.json."""
    return json.loads((folder / "summary.json").read_text("utf-8"))


def metrics(folder: Path, name: str) -> dict[int, float]:
    """The values of one column of metrics.csv: optimizer step -> value."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def copy_project(folder: Path) -> Path:
    """Copies the project, without hidden and built files, to the new folder."""
    skipped = shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun", "build", "*.egg-info", "shared")
    return shutil.copytree(ROOT, folder, ignore=skipped)


@contextlib.contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """The block changes no file of these folders, but for those of the cache."""

    def files() -> dict[Path, bytes]:
        inside = [(folder, path) for folder in folders for path in folder.rglob("*")]
        paths = {path for folder, path in inside if "cache" not in path.relative_to(folder).parts}
        return {path: path.read_bytes() if path.is_file() else b"" for path in paths}

    before = files()
    yield
    assert files() == before


def assert_golden(area: str, name: str, value: object) -> None:
    """Compares with the entry `name` of golden/AREA.json: numbers within 1e-5 (so counts exactly), all else exactly.

    With TRIL_GOLDEN=write in the environment, and without xdist, it writes the entry first.
    """
    path = GOLDEN / f"{area}.json"
    content = json.loads(path.read_text("utf-8"))
    if os.environ.get("TRIL_GOLDEN") == "write":
        content[name] = value
        path.write_text(json.dumps(dict(sorted(content.items())), indent=1, ensure_ascii=False) + "\n", "utf-8")
    assert value == pytest.approx(content[name], rel=1e-5)
