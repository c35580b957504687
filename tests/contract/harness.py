"""How all tests run the commands of Tril, in this process or in a copy of it, and read the files that they leave."""

import contextlib
import csv
import importlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a copy of a process has one of its threads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
COMMANDS = ("train", "sample", "play", "export", "heads", "evaluate", "certify", "report", "referee")
DRAWN_BY = "tril.model.training.summary.plot_losses"  # called at the end of a run


TINY = tuple(  # a run of one second
    """
    data.tokenizer.vocab_size=300 data.batch_size=4 model.context_length=32 model.n_layers=2 model.dim=32
    model.n_heads=2 trainer.max_steps=8 trainer.val_check_interval=4 trainer.log_every_n_steps=1
    trainer.accelerator=cpu trainer.precision=32-true optim.schedule.warmup_steps=2
    callbacks.samples.max_new_tokens=8
    """.split()
)
BARE = (*TINY, "~callbacks.samples", "~callbacks.heads", "~callbacks.causality")  # and nothing but training


class Done(subprocess.CompletedProcess):
    """An ended command: returncode (negative if it was killed), stdout and stderr."""

    def succeeded(self) -> "Done":
        assert self.returncode == 0, self.stderr[-3000:]
        return self

    def refused(self, *parts: object) -> "Done":
        """A user's mistake: status 2, nothing on stdout, and one line on stderr that contains the parts."""
        assert (self.returncode, self.stdout) == (2, ""), self
        assert self.stderr.startswith("error: ") and self.stderr.count("\n") == 1, self
        assert all(str(part) in self.stderr for part in parts), (parts, self.stderr)
        return self


@contextlib.contextmanager
def restored_logging() -> Iterator[None]:
    """A launcher of Hydra adds handlers, changes the level, and disables all loggers."""
    level, handlers = logging.root.level, logging.root.handlers[:]
    try:
        yield
    finally:
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.disabled = False


def run(name: str, *arguments: object, cwd: Path, strict: bool = False, **environment: str) -> Done:
    """`python NAME.py ARGUMENTS` in the folder `cwd`, in this process, where Tril is imported already.

    A run of two processes starts in a new one.

    Args:
        strict: a UserWarning is an error.
        environment: variables to set.
    """
    if "trainer.devices=2" in arguments:  # Lightning starts the program of this process again
        return Process(name, *arguments, cwd=cwd, **environment).done()
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.ExitStack() as stack:
        if name == "train":
            stack.enter_context(mock.patch(DRAWN_BY, small_picture))
        for context in (
            mock.patch.object(sys, "argv", [str(ROOT / f"{name}.py"), *map(str, arguments)]),
            mock.patch.dict(os.environ, {"TRIL_CACHE": f"{cwd}/cache", **environment}),
            contextlib.chdir(cwd),
            contextlib.redirect_stdout(streams[0]),
            contextlib.redirect_stderr(streams[1]),
            warnings.catch_warnings(),
            restored_logging(),
        ):
            stack.enter_context(context)
        if strict:
            warnings.simplefilter("error", UserWarning)
        status = call_main(name)
        for stream in streams:
            stream.flush()
    return Done(name, status, *(stream.buffer.getvalue().decode("utf-8") for stream in streams))


def main_of(name: str) -> Callable:
    modules = {"train": "tril.train", "torchrun": "torch.distributed.run"}
    return importlib.import_module(modules.get(name, f"tril.scripts.{name}")).main


def call_main(name: str) -> int:
    """The exit status of a command in this process."""
    GlobalHydra.instance().clear()
    try:
        main_of(name)()
    except SystemExit as ended:
        return int(ended.code or 0)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
    return 0


def small_picture(path: Path, *_, **__) -> None:
    """A PNG of one pixel instead of loss.png, whose drawing takes a third of the time of a tiny run."""
    from matplotlib.image import imsave

    imsave(path, [[0.0]])


class Process(multiprocessing.get_context("fork").Process):
    """`python NAME.py ARGUMENTS` in the folder `cwd`, in a copy of this process: for what ends or changes a process.

    Args:
        before: a function, which the process calls first.
        environment: variables to set.
    """

    def __init__(self, name: str, *arguments: object, cwd: Path, before: Callable = int, **environment: str):
        super().__init__(name=name)
        self.arguments, self.cwd, self.before, self.environment = arguments, cwd, before, environment
        self.pipes = [os.pipe(), os.pipe()]  # more than a file, which a full disk would limit
        self.start()
        for _, written in self.pipes:
            os.close(written)

    def run(self) -> None:
        for number, (_, written) in enumerate(self.pipes, 1):
            os.dup2(written, number)
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
        os.environ |= {"TRIL_CACHE": f"{self.cwd}/cache", **self.environment}
        os.chdir(self.cwd)
        sys.argv = [str(ROOT / f"{self.name}.py"), *map(str, self.arguments)]
        if self.name == "train":
            mock.patch(DRAWN_BY, small_picture).start()
        sys.modules["__main__"].__spec__ = None  # so Lightning starts this program, and not pytest, for each rank
        self.before()
        sys.exit(call_main(self.name))

    def done(self, timeout: float = 240) -> Done:
        """Waits for its end."""
        alarm = threading.Timer(timeout, self.kill)
        alarm.start()
        out, err = (open(read, encoding="utf-8").read() for read, _ in self.pipes)  # both are shorter than a pipe
        self.join()
        alarm.cancel()
        return Done(self.name, self.exitcode, out, err)


def train_in_copy(arguments: Sequence[str], log: Path) -> int:
    """Takes the place of `launch.spawn`: `python -P -m tril.train ...` in a copy of this process."""
    done = Process("train", *arguments[4:], cwd=Path.cwd()).done()
    log.write_text(done.stdout + done.stderr, "utf-8")
    return done.returncode


RUNS_IN_COPIES = mock.patch("tril.scripts.experiments.launch.spawn", train_in_copy)


def train(*settings: object, base: Sequence = TINY):
    """The run of train() in this process with settings that replace those of `base`; errors are exceptions."""
    from tril.train import train

    with mock.patch(DRAWN_BY, small_picture):
        return train(*merged(base, *settings))


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupted() -> Iterator[None]:
    """The run of the block ends with its first validation and its checkpoint."""
    from tril.model.training.checkpoints import Checkpoints

    original = Checkpoints.on_validation_end

    def on_validation_end(self, trainer, module):
        original(self, trainer, module)
        raise Interrupted

    with mock.patch.object(Checkpoints, "on_validation_end", on_validation_end), pytest.raises(Interrupted):
        yield


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


def install_wheel(folder: Path) -> None:
    """Builds the wheel and installs it, without what it requires, in the folder: `once("site", install_wheel)`."""
    with TemporaryDirectory() as temporary:
        source = copy_project(Path(temporary) / "source")
        pip = (sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-build-isolation", "--no-index")
        subprocess.run([*pip, "--no-compile", "--target", folder, source], check=True, timeout=240)


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
        rows = (f"{json.dumps(key)}: {json.dumps(x, ensure_ascii=False)}" for key, x in sorted(content.items()))
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")
    assert value == pytest.approx(content[name], rel=1e-5)
