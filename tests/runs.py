"""Tiny runs of train.py, for its tests."""

import contextlib
import csv
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.calls import call
from tests.contract import harness as contract
from tril.scripts.cli.app import compose

TINY = ["data=files", *contract.TINY]  # 8 steps, each logged, and two validations
DRAWN_BY = "tril.model.training.summary.plot_losses"  # called at the end of a run


def typed(*settings: str, base: list[str] = TINY) -> list[str]:
    """The settings of a tiny run, of each key the last one."""
    return contract.merged(base, *settings)


def in_process(*overrides, cwd) -> SimpleNamespace:
    """`python train.py ...` in this process."""
    from tril import train

    with mock.patch(DRAWN_BY, small_picture):
        return call(train.main, *overrides, cwd=cwd, TRIL_CACHE=str(Path(cwd) / "cache"))


def train_typed(settings: list[str]):
    """The run of these settings, in this process; errors are exceptions."""
    from tril import train
    from tril.model.training.stop import StopRequest

    return train.run(compose("train", settings), StopRequest())


def small_picture(path: Path, *_, **__) -> None:
    """A PNG of one pixel instead of loss.png, whose drawing takes a third of the time of a tiny run."""
    from matplotlib.image import imsave

    imsave(path, [[0.0]])


def rows(folder: Path) -> list[dict]:
    """The rows of all metrics.csv of a run."""
    files = sorted(folder.glob("csv/version_*/metrics.csv"))
    return [row for file in files for row in csv.DictReader(file.open())]


class Interrupted(Exception):
    pass


@contextlib.contextmanager
def interrupted():
    """The run of the block ends with its first validation and its checkpoint."""
    from tril.model.training.checkpoints import Checkpoints

    original = Checkpoints.on_validation_end

    def on_validation_end(self, trainer, module):
        original(self, trainer, module)
        raise Interrupted

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Checkpoints, "on_validation_end", on_validation_end)
        yield
