"""The lightning.Trainer of a run, with its callbacks and logger."""

import logging
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from tril.scripts.common.cli import nearest, plain, task_overrides
from tril.scripts.common.resume import Resumed
from tril.scripts.common.run_config import RunConfig
from tril.scripts.common.signals import StoppedError, StopRequest
from tril.scripts.common.targets import instantiate

if TYPE_CHECKING:
    from lightning import Trainer

    from tril.data.datamodule import TextDataModule
    from tril.model.training.callbacks.metrics import Metrics
    from tril.model.training.module import TrainingModule


def build_trainer(cfg: DictConfig, config: RunConfig, metrics: "Metrics", stop: StopRequest) -> "Trainer":
    """The Trainer; `metrics` is its first callback, since others read it.

    Args:
        stop: asks the run to stop at the end of a step.

    Raises:
        ValueError: an argument that Lightning, a callback or the logger refuses.
    """
    from lightning import Callback, Trainer
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from tril.model.training.callbacks.checkpoints import Checkpoints
    from tril.model.training.checkpointing import CheckpointFiles
    from tril.model.training.strategies import check_parallel, make_strategy
    from tril.model.training.trainer_config import TrainerConfig

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no tips between our lines
    warnings.filterwarnings("ignore", ".*all_gather is deprecated")  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # validation losses are those of all processes already
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*exists and is not empty")  # the folder of a resumed run
    names = TrainerConfig.__dataclass_fields__
    for name in cfg.trainer:
        if name not in names:
            raise ValueError(f"there is no setting trainer.{name}{nearest(name, names, 'trainer.')}")
    allowed = allowed_targets(cfg)
    callbacks = {name: instantiate(value, f"callbacks.{name}", allowed) for name, value in plain(cfg.callbacks).items()}
    for name, callback in callbacks.items():
        if not isinstance(callback, Callback | None):
            raise ValueError(f"callbacks.{name}={callback} must be a callback with a _target_, or null; correct it")
        check_file_name(name, callback, Path(cfg.output_dir))
    checkpoints = Checkpoints(cfg.output_dir, config.checkpoint, stop)
    logger = instantiate(plain(cfg.logger), "logger", allowed)
    if "id" in cfg.logger and cfg.logger.id is None:  # a resumed run keeps its identity at wandb
        cfg.logger.id = logger.version
    assert config.hardware is not None
    arguments: dict[str, Any] = {"plugins": [CheckpointFiles()]} | plain(cfg.trainer)
    arguments.pop("tensor_parallel_size", None)
    arguments |= {
        "accelerator": config.hardware.accelerator,
        "precision": config.hardware.precision,
        "strategy": make_strategy(config.trainer, cfg.trainer.devices),
        "default_root_dir": cfg.output_dir,
        "use_distributed_sampler": False,  # the data module gives each process its windows
        "logger": logger,
        # whether the run stops is decided first, so that the others know their last validation
        "callbacks": [metrics, *sorted(filter(None, callbacks.values()), key=does_not_stop), checkpoints],
        "val_check_interval": config.val_interval,
    }
    try:
        trainer = Trainer(**arguments)
    except (MisconfigurationException, TypeError) as error:  # Lightning's message about a wrong argument
        raise ValueError(f"trainer: {error}") from error
    check_parallel(trainer, config.model, config.hardware)
    return trainer


def does_not_stop(callback: object) -> bool:
    from lightning.pytorch.callbacks import EarlyStopping

    return not isinstance(callback, EarlyStopping)


def check_file_name(name: str, callback: object, folder: Path) -> None:
    """Raises ValueError if a ModelCheckpoint would write outside of the run's folder."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    if isinstance(callback, ModelCheckpoint):
        file = Path(callback.dirpath or folder, callback.filename or "")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"callbacks.{name} writes to {file}, which must be in the run's folder {folder}; correct it"
            )


def fit(
    trainer: "Trainer", module: "TrainingModule", data: "TextDataModule", resumed: Resumed | None, metrics: "Metrics"
) -> None:
    """Trains from the checkpoint or from the start. The run ends with a validation."""
    from tril.model.training.loggers import RunLog

    for logger in trainer.loggers:
        if isinstance(logger, RunLog) and trainer.is_global_zero:
            logger.start_after(None if resumed is None else resumed.step)
    try:
        trainer.fit(module, data, ckpt_path=None if resumed is None else resumed.path)
        if not metrics.val or metrics.val[-1]["step"] != trainer.global_step:  # no step was left
            trainer.validate(module, data, verbose=False)
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
    if not isinstance(targets, ListConfig) or not all(isinstance(target, str) for target in targets):
        raise ValueError(f"allow_targets={targets} must be a list, such as allow_targets=[package.module.Class]")
    return list(targets)
