"""Lightning's loggers, in addition to metrics.csv: configs/logger/ names them, and Hydra makes them."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import WandbLogger

from tril.model.runs import BEST, CHECKPOINTS, SUMMARY, SWEEP
from tril.model.training.settings import RunRefused


def wandb_logger(save_dir: str, project: str = "tril", **options: Any) -> WandbLogger:
    """A `WandbLogger` that continues the wandb run of a resumed run. Without an account it writes to disk only.

    The id of a run is in the names of wandb's folders, such as run-20261125_120000-a1b2c3d4. Runs of a sweep are a
    group at wandb.

    Args:
        save_dir: the folder of the run.
        options: of `WandbLogger`, such as log_model.
    """
    folder = Path(save_dir)
    ids = [path.name.rpartition("-")[2] for path in sorted((folder / "wandb").glob("*run-*-*"))]
    chosen: dict[str, Any] = {"id": ids[-1] if ids else secrets.token_hex(4), "name": folder.name}
    if (folder.parent / SWEEP).is_file():
        chosen["group"] = folder.parent.name
    if "WANDB_MODE" not in os.environ:
        import wandb

        if not wandb.login(prompt=False):
            chosen["mode"] = "offline"
    return WandbLogger(save_dir=folder, project=project, **chosen | options)


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
    """Gives a sample to wandb."""
    step = trainer.global_step
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_text("samples", ["step", "prompt", "text"], [[step, prompt, text]], step=step)  # pyright: ignore[reportArgumentType] any values


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
