"""The parts of a run that come from Hydra's configuration: callbacks and loggers, ours and those that a user adds."""

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, ListConfig

from tril.data.settings import build
from tril.model.runs import SWEEP
from tril.model.training.settings import CallbacksConfig, LoggerConfig
from tril.scripts.common.cli import command, nearest, plain, task_overrides
from tril.scripts.common.resume import Resumed
from tril.scripts.common.run_config import RunConfig
from tril.scripts.common.signals import StopRequest
from tril.scripts.common.targets import instantiate

if TYPE_CHECKING:
    from lightning import Callback, Trainer

REPLACED = {  # arguments of lightning.Trainer, and what to use in their place
    "fast_dev_run": "debug=true makes 20 steps of everything, or set trainer.max_steps=1",
    "overfit_batches": "data.token_budget=2000 trains on that many tokens, until train/loss is near 0",
}
OF_THE_RUN = ("_target_", "folder", "seed", "allow_leak", "save_dir")  # keys of our callbacks and loggers in yaml


def new_trainer(
    cfg: DictConfig, config: RunConfig, stop: StopRequest, started: float = 0.0, resumed: Resumed | None = None
) -> "Trainer":
    """The Trainer of a run.

    Args:
        stop: asks the run to stop at the end of a step.
        started: time.perf_counter() at the start of the process.

    Raises:
        ValueError: an argument that Lightning, a callback or the logger refuses.
    """
    from lightning.pytorch.loggers import Logger

    from tril.model.training.loggers import make_loggers, with_identity
    from tril.model.training.trainer import build_trainer, make_callbacks

    names, folder = type(config.trainer).__dataclass_fields__, Path(cfg.output_dir)
    for name in cfg.trainer:
        if name in REPLACED:
            raise ValueError(f"trainer.{name} is not supported; {REPLACED[name]}")
        if name not in names:
            raise ValueError(f"there is no setting trainer.{name}{nearest(name, names, 'trainer.')}")
    allowed, sweep = allowed_targets(cfg), sweep_of(folder)
    callbacks = make_callbacks(
        callbacks_of(cfg), folder, seed=cfg.seed, allow_leak=cfg.causality.allow_leak, in_sweep=sweep is not None
    )
    callbacks += foreign_callbacks(cfg, allowed)
    ours, fields = (
        {name: without_run(entry) for name, entry in plain(cfg.logger).items()},
        LoggerConfig.__dataclass_fields__,
    )
    logger = build(LoggerConfig, {name: x for name, x in ours.items() if name in fields}, "logger")
    logger = with_identity(logger, folder, sweep)
    if logger.wandb is not None:
        cfg.logger.wandb |= {key: getattr(logger.wandb, key) for key in ("id", "name", "group")}
    loggers = make_loggers(logger, folder.absolute(), None if resumed is None else resumed.step)
    for name, entry in plain(cfg.logger).items():
        if name not in fields and entry is not None:
            other = instantiate(entry, f"logger.{name}", allowed)
            if not isinstance(other, Logger):
                raise ValueError(f"logger.{name}={entry} must be a logger with a _target_, or null; correct it")
            loggers.append(other)
    assert config.hardware is not None
    return build_trainer(
        config.trainer,
        config.checkpoint,
        callbacks,
        loggers,
        hardware=config.hardware,
        folder=folder,
        stop=stop,
        started=started,
        resume=f"{command('train')} resume={folder}",
    )


def callbacks_of(cfg: DictConfig) -> CallbacksConfig:
    """The settings of our callbacks; one that is left out is off."""
    entries = plain(cfg.callbacks)
    names = CallbacksConfig.__dataclass_fields__
    for name in names:
        if (entry := entries.get(name)) is not None and not isinstance(entry, dict):
            raise ValueError(f"callbacks.{name}={entry} must be a callback with a _target_, or null; correct it")
    ours = {name: None if entries.get(name) is None else without_run(entries[name]) for name in names}
    return build(CallbacksConfig, ours, "callbacks")


def without_run(entry: Any) -> Any:
    """The options of a callback or logger, without what comes from the run."""
    return {key: x for key, x in entry.items() if key not in OF_THE_RUN} if isinstance(entry, dict) else entry


def foreign_callbacks(cfg: DictConfig, allowed: Collection[str]) -> "list[Callback]":
    """The callbacks that are not ours, each with its `_target_`."""
    from lightning import Callback

    found = []
    for name, entry in plain(cfg.callbacks).items():
        if name in CallbacksConfig.__dataclass_fields__ or entry is None:
            continue
        callback = instantiate(entry, f"callbacks.{name}", allowed)
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks.{name}={callback} must be a callback with a _target_, or null; correct it")
        check_file_name(name, callback, Path(cfg.output_dir))
        found.append(callback)
    return found


def check_file_name(name: str, callback: object, folder: Path) -> None:
    """Raises ValueError if a ModelCheckpoint would write outside of the run's folder."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    if isinstance(callback, ModelCheckpoint):
        file = Path(callback.dirpath or folder, callback.filename or "")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"callbacks.{name} writes to {file}, which must be in the run's folder {folder}; correct it"
            )


def sweep_of(folder: Path) -> Path | None:
    """The folder of the sweep that a run belongs to; the trials of +tune=lr are two folders deeper than its runs."""
    return next((parent for parent in folder.absolute().parents[:3] if (parent / SWEEP).is_file()), None)


@contextlib.contextmanager
def tracked(trainer: "Trainer", folder: Path, cfg: DictConfig) -> Iterator[None]:
    """Gives the results of the run in `folder` to its loggers after the block, also those of a run that failed.

    After a signal wandb ends its run when the process exits: an upload must not delay the requeueing of a job.
    """
    from tril.model.training.loggers import finish_loggers

    log_model = bool((plain(cfg.logger).get("wandb") or {}).get("log_model"))
    try:
        yield
    except Exception:
        finish_loggers(trainer, folder, failed=True)
        raise
    finish_loggers(trainer, folder, failed=False, log_model=log_model)


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
