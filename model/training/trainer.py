"""The lightning.Trainer of a run, with its callbacks and loggers, and the training itself."""

import contextlib
import dataclasses
import gc
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import Logger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.callbacks.checkpoints import Checkpoints, Stop
from tril.model.training.callbacks.early_stop import EarlyStop
from tril.model.training.callbacks.gradient_norms import GradientNorms
from tril.model.training.callbacks.head_metrics import HeadMetrics
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.callbacks.progress import Progress
from tril.model.training.callbacks.samples import Samples
from tril.model.training.callbacks.window_losses import WindowLosses
from tril.model.training.checkpointing import CheckpointFiles
from tril.model.training.gc_pause import gc_paused
from tril.model.training.hardware import Hardware
from tril.model.training.loggers import start_loggers
from tril.model.training.module import TrainingModule
from tril.model.training.parallel import make_strategy
from tril.model.training.settings import CallbacksConfig, CheckpointConfig, TrainerConfig

OURS = {
    "accelerator",
    "precision",
    "strategy",
    "profiler",
    "val_check_interval",
    "check_val_every_n_epoch",
    "max_flops",
}


class GarbageCollection(Callback):
    """Python's garbage collector runs at validations only, since a collection delays a step; see `fit`."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()


def build_trainer(
    config: TrainerConfig,
    checkpoint: CheckpointConfig,
    callbacks: Sequence[Callback],
    loggers: Sequence[Logger],
    *,
    hardware: Hardware,
    folder: Path,
    stop: Stop,
    started: float = 0.0,
    resume: str = "",
) -> Trainer:
    """The Trainer of a run.

    Args:
        callbacks: of `make_callbacks`, and others.
        stop: asks the run to stop at the end of a step.
        started: time.perf_counter() at the start of the process.
        resume: the command that continues the run.

    Raises:
        ValueError: an argument that Lightning refuses.
    """
    quiet_lightning()
    arguments: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name not in OURS and (value := getattr(config, field.name)) is not None
    }
    try:
        trainer = Trainer(
            accelerator=hardware.accelerator,
            precision=hardware.precision,  # pyright: ignore[reportArgumentType] one of Lightning's
            strategy=make_strategy(config, resume),
            val_check_interval=config.val_check_interval * config.accumulate_grad_batches,  # in micro-batches
            check_val_every_n_epoch=config.check_val_every_n_epoch,
            default_root_dir=folder,
            plugins=[CheckpointFiles()],
            profiler=make_profiler(config.profiler, folder),
            use_distributed_sampler=False,  # the data module gives each process its windows
            logger=list(loggers),
            callbacks=in_order(callbacks, Metrics(hardware.peak_flops, started), Checkpoints(folder, checkpoint, stop)),
            **arguments,
        )
    except (MisconfigurationException, TypeError) as error:  # Lightning's message about a wrong argument
        raise ValueError(f"trainer: {error}") from error
    return trainer


def in_order(callbacks: Sequence[Callback], metrics: Metrics, checkpoints: Checkpoints) -> list[Callback]:
    """The one order of callbacks, in which Lightning calls them.

    Metrics come first, since others show what they measured; then what may stop the run, so that the others know their
    last validation. Checkpoints come last, with the complete state of all.
    """
    ordered = [metrics, *sorted(callbacks, key=lambda each: not isinstance(each, EarlyStop)), checkpoints]
    assert len({type(each) for each in ordered if isinstance(each, Metrics | Checkpoints)}) == 2
    return ordered


def make_callbacks(
    config: CallbacksConfig, folder: Path, *, seed: int, allow_leak: bool = False, in_sweep: bool = False
) -> list[Callback]:
    """The callbacks of a run, apart from `Metrics` and `Checkpoints`.

    Args:
        seed: of the samples.
        allow_leak: train a model that sees the future.
        in_sweep: runs are compared at equal lengths, so early stopping that nobody asked for is left out.
    """
    found: dict[str, Callback] = {}
    if config.early_stop is not None and not (in_sweep and config.early_stop.min_passes):
        found["early_stop"] = EarlyStop(**vars_of(config.early_stop))
    if config.causality is not None:
        found["causality"] = CausalityCheck(folder, allow_leak)
    if config.gradients is not None:
        found["gradients"] = GradientNorms(**vars_of(config.gradients))
    if config.gc is not None:
        found["gc"] = GarbageCollection()
    if config.windows is not None:
        found["windows"] = WindowLosses(folder)
    if config.heads is not None:
        found["heads"] = HeadMetrics(**vars_of(config.heads))
    if config.progress is not None:
        found["progress"] = Progress(**vars_of(config.progress))
    if config.samples is not None:
        found["samples"] = Samples(folder, seed=seed, **vars_of(config.samples))
    return list(found.values())


def vars_of(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


def make_profiler(kind: str | None, folder: Path) -> Profiler | None:
    """Lightning's profiler, whose report goes to fit-profile.txt in the run's folder."""
    if kind == "pytorch":  # without the hooks on modules by name, since a module with them cannot be copied
        return PyTorchProfiler(dirpath=folder, filename="profile", record_module_names=False)
    kinds = {"simple": SimpleProfiler, "advanced": AdvancedProfiler}
    return None if kind is None else kinds[kind](dirpath=folder, filename="profile")


def quiet_lightning() -> None:
    """No tips and warnings between our lines."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", ".*all_gather is deprecated")  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6


def fit(
    trainer: Trainer, module: TrainingModule, data: Any, *, checkpoint: Path | None, settings: dict[str, Any]
) -> None:
    """Trains from a checkpoint or from the start. The run ends with a validation.

    Args:
        data: LightningDataModule.
        settings: of the run, for the loggers.
    """
    metrics = Metrics.of(trainer)
    with contextlib.ExitStack() as stack:
        start_loggers(trainer, settings)
        if any(isinstance(callback, GarbageCollection) for callback in trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue] dynamic
            stack.enter_context(gc_paused())
        trainer.fit(module, data, ckpt_path=checkpoint)
        if not metrics.val or metrics.val[-1]["step"] != trainer.global_step:  # no step was left
            trainer.validate(module, data, verbose=False)
