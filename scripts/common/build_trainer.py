"""The lightning.Trainer of a run, with its callbacks and loggers."""

import contextlib
import logging
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from tril.model.runs import SWEEP
from tril.scripts.common.cli import command, nearest, plain, task_overrides
from tril.scripts.common.resume import Resumed
from tril.scripts.common.run_config import RunConfig
from tril.scripts.common.signals import StoppedError, StopRequest
from tril.scripts.common.targets import instantiate

if TYPE_CHECKING:
    from lightning import Trainer
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.profilers import Profiler

    from tril.data.datamodule import TextDataModule
    from tril.model.training.callbacks.metrics import Metrics
    from tril.model.training.module import TrainingModule

REPLACED = {  # arguments of lightning.Trainer, and what to use in their place
    "fast_dev_run": "debug=true makes 20 steps of everything, or set trainer.max_steps=1",
    "overfit_batches": "data.token_budget=2000 trains on that many tokens, until train/loss is near 0",
}


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
    from tril.model.training.parallel import check_processes, make_strategy
    from tril.model.training.trainer_config import TrainerConfig

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # no tips between our lines
    warnings.filterwarnings("ignore", ".*all_gather is deprecated")  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")  # validation losses are those of all processes already
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*exists and is not empty")  # the folder of a resumed run
    names = TrainerConfig.__dataclass_fields__
    for name in cfg.trainer:
        if name in REPLACED:
            raise ValueError(f"trainer.{name} is not supported; {REPLACED[name]}")
        if name not in names:
            raise ValueError(f"there is no setting trainer.{name}{nearest(name, names, 'trainer.')}")
    allowed = allowed_targets(cfg)
    callbacks = {name: instantiate(value, f"callbacks.{name}", allowed) for name, value in plain(cfg.callbacks).items()}
    for name, callback in callbacks.items():
        if not isinstance(callback, Callback | None):
            raise ValueError(f"callbacks.{name}={callback} must be a callback with a _target_, or null; correct it")
        check_file_name(name, callback, Path(cfg.output_dir))
    checkpoints = Checkpoints(cfg.output_dir, config.checkpoint, stop)
    assert config.hardware is not None
    arguments: dict[str, Any] = {"plugins": [CheckpointFiles()]} | plain(cfg.trainer)
    arguments |= {
        "accelerator": config.hardware.accelerator,
        "precision": config.hardware.precision,
        "strategy": make_strategy(config.trainer, f"{command('train')} resume={cfg.output_dir}"),
        "default_root_dir": cfg.output_dir,
        "profiler": make_profiler(config.trainer.profiler, cfg.output_dir),
        "use_distributed_sampler": False,  # the data module gives each process its windows
        "logger": build_loggers(cfg, allowed),
        # whether the run stops is decided first, so that the others know their last validation
        "callbacks": [metrics, *sorted(filter(None, callbacks.values()), key=does_not_stop), checkpoints],
        "val_check_interval": config.val_interval,
    }
    try:
        trainer = Trainer(**arguments)
    except (MisconfigurationException, TypeError) as error:  # Lightning's message about a wrong argument
        raise ValueError(f"trainer: {error}") from error
    check_processes(trainer)
    return trainer


def make_profiler(kind: str | None, folder: str) -> "Profiler | None":
    """Lightning's profiler, whose report goes to fit-profile.txt in the run's folder."""
    from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler

    profilers = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    # without the hooks on modules by name, since a module with them cannot be copied
    options = {"record_module_names": False} if kind == "pytorch" else {}
    return None if kind is None else profilers[kind](dirpath=folder, filename="profile", **options)


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


def build_loggers(cfg: DictConfig, allowed: Collection[str]) -> "list[Logger]":
    """The log of the run, which every run has, and the trackers of `cfg.logger` by name.

    A run's identity at wandb and the names of its folder are added to `cfg`, so that a resumed run keeps them.
    """
    from lightning.pytorch.loggers import Logger

    from tril.model.training.loggers import RunLog
    from tril.model.training.trackers import guarded

    folder, loggers = Path(cfg.output_dir).absolute(), []
    sweep = sweep_of(folder)
    for name, entry in cfg.logger.items():
        if entry is None:
            continue
        logger = None
        if isinstance(entry, DictConfig):
            if "id" in entry:  # wandb's
                entry.name = entry.get("name") or (str(folder.relative_to(sweep)) if sweep else folder.name)
                entry.group = entry.get("group") or ("/".join(sweep.parts[-2:]) if sweep else None)  # DATE/TIME
            logger = instantiate(plain(entry), f"logger.{name}", allowed)
        if not isinstance(logger, Logger):
            raise ValueError(f"logger.{name}={entry} must be a logger with a _target_, or null; correct it")
        if "id" in entry:
            entry.id = logger.version
        loggers.append(guarded(logger))
    return [RunLog(folder), *loggers]


def sweep_of(folder: Path) -> Path | None:
    """The folder of the sweep that a run belongs to; the trials of +tune=lr are two folders deeper than its runs."""
    return next((parent for parent in folder.absolute().parents[:3] if (parent / SWEEP).is_file()), None)


def fit(
    trainer: "Trainer",
    module: "TrainingModule",
    data: "TextDataModule",
    resumed: Resumed | None,
    metrics: "Metrics",
    settings: dict[str, Any],
) -> None:
    """Trains from the checkpoint or from the start. The run ends with a validation.

    Args:
        settings: of the run, for the trackers.
    """
    from tril.model.training.summary import code_version
    from tril.model.training.trackers import start_loggers

    start_loggers(trainer, settings | {"code": code_version()}, None if resumed is None else resumed.step)
    try:
        trainer.fit(module, data, ckpt_path=None if resumed is None else resumed.path)
        if not metrics.val or metrics.val[-1]["step"] != trainer.global_step:  # no step was left
            trainer.validate(module, data, verbose=False)
    except StoppedError as stopped:
        stopped.step = trainer.global_step
        raise


@contextlib.contextmanager
def tracked(trainer: "Trainer", folder: Path) -> Iterator[None]:
    """Gives the results of the run in `folder` to the trackers after the block, also those of a run that failed.

    After a signal wandb ends its run when the process exits: an upload must not delay the requeueing of a job.
    """
    from tril.model.training.trackers import finish_loggers

    try:
        yield
    except Exception:
        finish_loggers(trainer, folder, failed=True)
        raise
    finish_loggers(trainer, folder, failed=False)


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
