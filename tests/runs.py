"""Tiny runs of train.py, for its tests."""

import contextlib
import csv
import importlib
import itertools
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.contract import harness as contract
from tril.scripts.cli.app import DECLARED, compose
from tril.scripts.cli.config import RunConfig, TrainCommand

TINY = ["data=files", *contract.TINY]  # 8 steps, each logged, and two validations


def typed(*settings: str, base: list[str] = TINY) -> list[str]:
    """The settings of a tiny run, of each key the last one."""
    return contract.merged(base, *settings)


def train_typed(settings: list[str]):
    """The run of these settings, in this process; errors are exceptions."""
    from tril import train

    composed = compose("train", settings)
    return train.run(composed.own(TrainCommand), composed)


def accept(name: str, *settings: str) -> None:
    """Composes and checks the settings of a command as the program does, of a grid in each run, and runs nothing."""
    importlib.import_module("tril.train" if name == "train" else f"tril.scripts.{name}")
    elsewhere = ("-", "+ablation=", "hydra/", "hydra.launcher.")  # tests/test_configs.py has the ablations
    rows = [[word for word in settings if not word.startswith(elsewhere)]]
    if "-m" in settings:
        parsed = OverridesParser.create().parse_overrides(rows[0])
        rows = itertools.product(*(swept(each) if each.is_sweep_override() else [each.input_line] for each in parsed))
    for row in rows:
        composed = compose(name, list(row))
        own = composed.own(DECLARED[name].own)
        if name == "train" and not (own.resume or own.init_from):
            RunConfig.of(composed.settings, composed.given)


def swept(override) -> list[str]:
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


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
