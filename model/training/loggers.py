"""Weights & Biases, as configs/logger/wandb.yaml names it and Hydra makes it."""

import secrets
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger


def wandb_logger(save_dir: str, **options: Any) -> WandbLogger:
    """Lightning's logger, which continues the wandb run of a resumed run.

    The id of a wandb run is in the name of its folder, such as wandb/run-20261125_120000-a1b2c3d4.

    Args:
        save_dir: the folder of the run.
        options: of `WandbLogger`.
    """
    ids = [path.name.rpartition("-")[2] for path in sorted(Path(save_dir, "wandb").glob("*run-*-*"))]
    chosen: dict[str, Any] = {"id": ids[-1] if ids else secrets.token_hex(4), "name": Path(save_dir).name}
    logger = WandbLogger(save_dir=save_dir, **chosen | options)
    logger._wandb_init.pop("anonymous", None)  # of Lightning 2.6; wandb warns that it has no effect
    return logger
