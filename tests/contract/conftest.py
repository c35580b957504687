"""The text and the runs that the contract tests share: made once for all workers, and only read."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from filelock import FileLock

from tests.contract.harness import BARE, TINY, copy_project, newest_run, train_run

WORDS = "a the red old small dog cat bird tree house sees finds likes near under and then when it sings runs".split()


@pytest.fixture(autouse=True)
def same_start():
    """A fixed seed, and one thread or those of OMP_NUM_THREADS."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], object]], Path]:
    """A function: once("name", make) calls make(folder) in the first worker that asks, and returns the folder."""
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    base.mkdir(exist_ok=True)

    def once(name: str, make: Callable[[Path], object]) -> Path:
        folder, ready = base / name, base / f"{name}.ready"
        with FileLock(base / f"{name}.lock"):
            if not ready.exists():
                folder.mkdir()
                make(folder)
                ready.touch()
        return folder

    return once


def install_wheel(folder: Path) -> None:
    """Builds the wheel and installs it, without what it requires, in the folder: `once("site", install_wheel)`."""
    with TemporaryDirectory() as temporary:
        source = copy_project(Path(temporary) / "source")
        pip = (sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-build-isolation", "--no-index")
        subprocess.run([*pip, "--target", folder, source], check=True, timeout=240)


@pytest.fixture(scope="session")
def texts(once) -> Path:
    """A pattern for 40 text files with 26 kB of sentences."""

    def write(folder: Path) -> None:
        chance = random.Random(0)
        for number in range(40):
            sentences = [" ".join(chance.choices(WORDS, k=chance.randint(4, 9))).capitalize() + "." for _ in range(18)]
            (folder / f"{number:02}.txt").write_text("\n".join(sentences) + "\n", "utf-8")

    return once("texts", write) / "*.txt"


@pytest.fixture(scope="session")
def run_of(once, texts) -> Callable[..., Path]:
    """A function: the folder of a finished run with these settings, which is trained once."""

    def run_of(*settings: object, base=BARE) -> Path:
        settings = (f"data.path={texts}", *settings)
        name = hashlib.sha256(repr((settings, base)).encode()).hexdigest()
        return newest_run(once(name, lambda cwd: train_run(*settings, cwd=cwd, base=base)))

    return run_of


@pytest.fixture(scope="session")
def trained(run_of) -> Path:
    """The folder of a finished run of 8 steps with everything that is on by default."""
    return run_of(base=TINY)
