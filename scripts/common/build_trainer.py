"""The lightning.Trainer of a run, with its callbacks and logger."""

import inspect
import logging
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from tril.model.runs import CHECKPOINTS
from tril.scripts.common.cli import nearest, plain, task_overrides
from tril.scripts.common.run_config import RunConfig
from tril.scripts.common.signals import StoppedError
from tril.scripts.common.targets import instantiate

if TYPE_CHECKING:
    from lightning import Trainer

    from tril.data.datamodule import TextDataModule
    from tril.model.training.callbacks.metrics import Metrics
    from tril.model.training.module import TrainingModule


def build_trainer(cfg: DictConfig, config: RunConfig, metrics: "Metrics") -> "Trainer":
    """The Trainer; `metrics` is its first callback, since others read it.

    Raises:
        ValueError: an argument that Lightning, a callback or the logger refuses.
    """
    from lightning import Callback, Trainer
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from tril.model.training.checkpointing import WholeFiles

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # no tips between our lines
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*exists and is not empty")  # the folder of a resumed run
    names = inspect.signature(Trainer.__init__).parameters
    for name in cfg.trainer:
        if name not in names:
            raise ValueError(f"there is no setting trainer.{name}{nearest(name, names, 'trainer.')}")
    allowed = allowed_targets(cfg)
    callbacks = {name: instantiate(value, f"callbacks.{name}", allowed) for name, value in plain(cfg.callbacks).items()}
    for name, callback in callbacks.items():
        if not isinstance(callback, Callback | None):
            raise ValueError(f"callbacks.{name}={callback} must be a callback with a _target_, or null; correct it")
    logger = instantiate(plain(cfg.logger), "logger", allowed)
    assert config.hardware is not None
    arguments: dict[str, Any] = {"plugins": [WholeFiles()]} | plain(cfg.trainer)
    arguments |= {
        "accelerator": config.hardware.accelerator,
        "precision": config.hardware.precision,
        "default_root_dir": cfg.output_dir,
        "use_distributed_sampler": False,  # the data module gives each process its windows
        "logger": logger,
        "callbacks": [metrics, *filter(None, callbacks.values())],
    }
    try:
        return Trainer(**arguments)
    except (MisconfigurationException, TypeError) as error:  # Lightning's message about a wrong argument
        raise ValueError(f"trainer: {error}") from error


def fit(
    trainer: "Trainer", module: "TrainingModule", data: "TextDataModule", checkpoint: Path | None, metrics: "Metrics"
) -> None:
    """Trains from the checkpoint or from the start. The run ends with a validation and its checkpoint."""
    try:
        trainer.fit(module, data, ckpt_path=checkpoint)
        if metrics.val and metrics.val[-1]["step"] == trainer.global_step:
            return
        trainer.validate(module, data, verbose=False)
        folder = Path(trainer.default_root_dir) / CHECKPOINTS
        trainer.save_checkpoint(folder / "last.ckpt")
        if metrics.val[-1] == metrics.best():
            trainer.save_checkpoint(folder / "best.ckpt")
    except StoppedError as stopped:
        stopped.step = trainer.global_step
        raise


def allowed_targets(cfg: DictConfig) -> Collection[str]:
    """Targets of the key `allow_targets`. Raises ValueError if a file sets it: only the command line is trusted."""
    targets = cfg.get("allow_targets")
    if targets is None:
        return ()
    overrides = task_overrides()
    if overrides and not any(override.lstrip("+").startswith("allow_targets=") for override in overrides):
        raise ValueError(f"allow_targets={targets} must be set on the command line, not in a file; remove it there")
    if not isinstance(targets, ListConfig):
        raise ValueError(f"allow_targets={targets} must be a list, such as allow_targets=[package.module.Class]")
    return list(targets)
