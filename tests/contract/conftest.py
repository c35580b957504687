"""The text and the runs that the contract tests share: made once for all workers, and only read."""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from tests.contract.harness import BARE, TINY, newest_run, run, train_run

WORDS = "a the red old small dog cat bird tree house sees finds likes near under and then when it sings runs".split()


@pytest.fixture(autouse=True)
def same_start():
    """A fixed seed, and one thread or those of OMP_NUM_THREADS."""
    torch.manual_seed(0)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


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


@pytest.fixture(scope="session")
def texts(once) -> Path:
    """A pattern for 40 text files with 26 kB of sentences."""
    return once("texts", write_texts) / "*.txt"


def write_texts(folder: Path) -> None:
    chance = random.Random(0)
    for number in range(40):
        sentences = [" ".join(chance.choices(WORDS, k=chance.randint(4, 9))).capitalize() + "." for _ in range(18)]
        (folder / f"{number:02}.txt").write_text("\n".join(sentences) + "\n", "utf-8")


@pytest.fixture(scope="session")
def trained(once, texts) -> Path:
    """The folder of a finished run of 8 steps with everything that is on by default."""
    return newest_run(once("trained", lambda cwd: train_run(f"data.path={texts}", cwd=cwd, base=TINY)))


@pytest.fixture(scope="session")
def sweep(once, texts) -> Path:
    """The folder of a sweep over 2 numbers of heads and 2 seeds."""

    def make(cwd: Path) -> None:
        grid = ("model.n_heads=2,4", "seed=0,1")
        run("train", "-m", *TINY, *BARE, f"data.path={texts}", *grid, cwd=cwd).succeeded()

    (table,) = once("sweep", make).glob("multirun/**/sweep.json")
    return table.parent


@pytest.fixture(scope="session")
def exported(once, texts) -> Path:
    """A folder of Hugging Face transformers with a GPT-2, exported from the run `newest_run(exported.parent)`."""

    def make(cwd: Path) -> None:
        train_run("model=gpt2", f"data.path={texts}", cwd=cwd)
        run("export", "ckpt=latest", f"out={cwd / 'model'}", cwd=cwd).succeeded()

    return once("exported", make) / "model"
