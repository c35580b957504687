"""Weights & Biases, as configs/logger/wandb.yaml names it and Hydra makes it."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning import Trainer
from lightning.pytorch.loggers import WandbLogger

from tril.model.runs import BEST, CHECKPOINTS, SUMMARY, in_sweep


def wandb_logger(save_dir: str, project: str = "tril", **options: Any) -> WandbLogger:
    """A `WandbLogger` that continues the wandb run of a resumed run. Without an account it writes to disk only.

    The id of a run is in the names of wandb's folders, such as run-20261125_120000-a1b2c3d4. Runs of a sweep are a
    group at wandb.

    Args:
        save_dir: the folder of the run.
        options: of `WandbLogger`.
    """
    folder = Path(save_dir)
    ids = [path.name.rpartition("-")[2] for path in sorted((folder / "wandb").glob("*run-*-*"))]
    chosen: dict[str, Any] = {"id": ids[-1] if ids else secrets.token_hex(4), "name": folder.name}
    chosen["group"] = folder.parent.name if in_sweep(folder) else None
    if "WANDB_MODE" not in os.environ:
        import wandb

        chosen["mode"] = None if wandb.login(prompt=False) else "offline"
    logger = WandbLogger(save_dir=folder, project=project, **chosen | options)
    logger._wandb_init.pop("anonymous", None)  # of Lightning 2.6; wandb warns that it has no effect
    return logger


@contextlib.contextmanager
def finished_loggers(trainer: Trainer) -> Iterator[None]:
    """Ends the wandb run after the block; otherwise it lasts as long as the process. A signal ends it at once."""
    try:
        yield
    except Exception:
        finish_loggers(trainer, failed=True)
        raise
    finish_loggers(trainer, failed=False)


def finish_loggers(trainer: Trainer, *, failed: bool) -> None:
    """Gives the results of the run to wandb, and ends it there.

    With `logger.wandb.log_model`, wandb gets the best checkpoint, which holds the tokenizer too.

    Args:
        failed: the run ended with an exception.
    """
    folder = Path(trainer.default_root_dir)
    best, summary = folder / CHECKPOINTS / BEST, folder / SUMMARY
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, WandbLogger) and logger._experiment is not None:
            run = logger.experiment
            run.summary.update(json.loads(summary.read_text("utf-8")) if summary.is_file() else {})
            if logger._log_model and best.is_file():
                run.log_artifact(str(best), f"model-{run.id}", "model")
            run.finish(exit_code=int(failed))
