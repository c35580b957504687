"""Tiny runs of train.py, for the tests of it."""

import csv
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from tests.conftest import run_python
from tril.scripts.common.cli import CONFIGS

TINY = [
    "data=files",
    "data.tokenizer.vocab_size=300",
    "data.batch_size=4",
    "model.context_length=32",
    "model.n_layers=2",
    "model.dim=32",
    "model.n_heads=2",
    "trainer.max_steps=8",
    "trainer.val_check_interval=4",
    "trainer.log_every_n_steps=2",
    "trainer.accelerator=cpu",
    "trainer.precision=32-true",
    "optim.schedule.warmup_steps=2",
    "callbacks.samples.max_new_tokens=8",
]


def composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("train", [*TINY, *overrides])


def command_line(*overrides, cwd, **environment):
    """`python train.py ...` in a process of its own."""
    return run_python(
        CONFIGS.parent / "train.py", *overrides, cwd=cwd, TRIL_CACHE=str(Path(cwd) / "cache"), **environment
    )


def rows(folder: Path) -> list[dict]:
    files = sorted(folder.glob("csv/version_*/metrics.csv"))
    return [row for file in files for row in csv.DictReader(file.open())]


class Interrupted(Exception):
    pass


def stop_after(step):
    def on_validation_end(self, trainer, module):
        trainer.save_checkpoint(Path(self.path).parent / "checkpoints" / "last.ckpt")
        raise Interrupted

    return on_validation_end
