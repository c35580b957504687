"""Lightning's loggers for Weights & Biases and TensorBoard, in addition to metrics.csv."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from tril.model.runs import BEST, CHECKPOINTS, SUMMARY
from tril.model.training.errors import RunRefused
from tril.model.training.settings import LoggerConfig, WandbConfig


def make_loggers(config: LoggerConfig, folder: Path, *, step: int | None, sweep: Path | None = None) -> list[Logger]:
    """The loggers that the settings choose. Without an account wandb's run stays on disk, for `wandb sync`.

    Args:
        step: of the checkpoint that the run continues; None: a new run.
        sweep: the folder of the run's sweep, which groups its runs at wandb; None: a single run.

    Raises:
        ValueError: a package is missing.
    """
    loggers: list[Logger] = []
    tracker = "wandb"
    try:
        if config.wandb is not None:
            loggers.append(_wandb_logger(config.wandb, folder, sweep))
        tracker = "tensorboard"
        if config.tensorboard is not None:
            # what was logged after the checkpoint is hidden
            purge: dict[str, Any] = {} if step is None else {"purge_step": step + 1}
            loggers.append(TensorBoardLogger(folder, "tensorboard", "", default_hp_metric=False, **purge))
    except ModuleNotFoundError as error:
        raise ValueError(f'logger={tracker} needs a package; pip install -e ".[{tracker}]"') from error
    return loggers


def _wandb_logger(config: WandbConfig, folder: Path, sweep: Path | None) -> WandbLogger:
    """A resumed run has the id that is in the names of wandb's folders, such as run-20261125_120000-a1b2c3d4."""
    ids = [path.name.rpartition("-")[2] for path in sorted((folder / "wandb").glob("*run-*-*"))]
    options: dict[str, Any] = {"id": ids[-1] if ids else secrets.token_hex(4), "name": folder.name}
    if sweep is not None:
        options |= {"name": str(folder.relative_to(sweep)), "group": "/".join(sweep.parts[-2:])}  # DATE/TIME
    if "WANDB_MODE" not in os.environ:
        import wandb

        if not wandb.login(prompt=False):
            options["mode"] = "offline"
    return WandbLogger(project=config.project, log_model=config.log_model, save_dir=folder, **options)


def start_loggers(trainer: Trainer, settings: dict[str, Any]) -> None:
    """Gives the settings of the run to the loggers.

    Raises:
        RunRefused: one does not start, such as for a refused key.
    """
    for logger in trainer.loggers if trainer.is_global_zero else ():
        try:
            logger.log_hyperparams(settings)
        except Exception as error:
            message = f"{type(logger).__name__} does not start: {' '.join(str(error).split())}"
            raise RunRefused(f"{message}; correct that, or leave it out with logger=csv") from error


def log_sample(trainer: Trainer, prompt: str, text: str) -> None:
    """Gives a sample to the trackers."""
    step = trainer.global_step
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_text("samples", ["step", "prompt", "text"], [[step, prompt, text]], step=step)  # pyright: ignore[reportArgumentType] any values
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text("sample", f"```\n{prompt}{text}\n```", step)


def finish_loggers(trainer: Trainer, *, failed: bool) -> None:
    """Gives the results of the run to wandb, and ends it there, where it otherwise lasts as long as the process.

    With `logger.wandb.log_model`, wandb gets the best checkpoint, which holds the tokenizer too.

    Args:
        failed: the run ended with an exception.
    """
    folder = Path(trainer.default_root_dir)
    best = folder / CHECKPOINTS / BEST
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if not isinstance(logger, WandbLogger) or logger._experiment is None:
            continue
        run = logger.experiment
        if (folder / SUMMARY).is_file():
            run.summary.update(json.loads((folder / SUMMARY).read_text(encoding="utf-8")))
        if logger._log_model and best.is_file():
            run.log_artifact(str(best), f"model-{run.id}", "model")
        run.finish(exit_code=int(failed))
