"""The lightning.Trainer of a run, with its callbacks and loggers, and the training itself."""

import contextlib
import gc
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import Logger

from tril.data.datamodule import TextDataModule
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.callbacks.output import HeadMetrics, Progress, Samples
from tril.model.training.checkpoints import CheckpointFiles, Checkpoints, Stop, any_process
from tril.model.training.errors import NonFiniteError
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.loggers import finish_loggers, make_loggers, start_loggers
from tril.model.training.module import TrainingModule
from tril.model.training.parallel import make_strategy
from tril.model.training.settings import CallbacksConfig, CheckpointConfig, EarlyStopConfig, LoggerConfig, TrainerConfig
from tril.model.training.summary import summarize

PASSED_ON = ("max_steps", "accumulate_grad_batches", "log_every_n_steps", "num_nodes", "devices")  # to the Trainer
PASSED_ON += ("limit_val_batches", "gradient_clip_val")
# torch's CPU allocator (Linux and macOS, then Windows) and MPS; on CUDA it has an exception of its own.
MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|MPS backend out of memory")


class EarlyStop(Callback):
    """Ends a run after a number of validations without a lower loss, or after a time. best.ckpt has the best weights.

    Args:
        config: None: the losses do not matter.
        max_time: of the whole run in all its processes, DD:HH:MM:SS; None: any.
    """

    def __init__(self, config: EarlyStopConfig | None, max_time: str | None) -> None:
        self.config, self.seconds = config, math.inf
        if max_time is not None:
            days, hours, minutes, seconds = map(int, max_time.split(":"))
            self.seconds = ((days * 24 + hours) * 60 + minutes) * 60 + seconds

    def limit(self, val: Sequence[Mapping[str, Any]], seconds: float) -> str | None:
        """The setting that ends a run after these validations (see `Metrics.val`) and seconds; None: it goes on."""
        losses = [row["loss"] for row in val]
        if seconds >= self.seconds:
            return "trainer.max_time"
        if self.config is None or not losses or len(losses) - 1 - losses.index(min(losses)) < self.config.patience:
            return None
        return "callbacks.early_stop.patience"

    def _check(self, trainer: Trainer) -> None:
        metrics = Metrics.of(trainer)
        is_over = self.limit(metrics.val, metrics.wall_seconds()) is not None
        trainer.should_stop = trainer.should_stop or any_process(trainer, is_over)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """A run that had stopped makes no step when it is resumed, unless the limit is raised."""
        if trainer.global_step:
            self._check(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        if self.seconds < math.inf:
            self._check(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._check(trainer)


class GarbageCollection(Callback):
    """Python's garbage collector runs at validations only, since a collection delays a step; see `gc_paused`."""

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        gc.collect()


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Python's garbage collector does not run in the block, nor does it ever search what exists when that begins."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def build_trainer(
    config: TrainerConfig,
    callbacks: CallbacksConfig,
    logger: LoggerConfig,
    checkpoint: CheckpointConfig,
    *,
    hardware: Hardware,
    folder: Path,
    stop: Stop,
    passes: float,
    seed: int = 0,
    allow_leak: bool = False,
    sweep: Path | None = None,
    step: int | None = None,
    started: float = 0.0,
    resume: str = "",
    added: tuple[Sequence[Callback], Sequence[Logger]] = ((), ()),
) -> Trainer:
    """The Trainer of a run, with its callbacks and loggers.

    Args:
        stop: asks the run to stop at the end of a step.
        passes: of the run over its text, which decide whether it may stop early.
        seed: of the samples.
        allow_leak: train a model that sees the future.
        sweep: the folder of the run's sweep, whose runs are compared at equal lengths: one that would read its text
            often does not stop early, unless `min_passes` is 0; None: a single run.
        step: of the checkpoint that the run continues; None: a new run.
        started: time.perf_counter() at the start of the process.
        resume: the command that continues the run.
        added: further callbacks and loggers.

    Raises:
        ValueError: a tracker's package is missing.
    """
    quiet_lightning()
    # The order in which Lightning calls them: Metrics first, since the others show what it measured; then what may stop
    # the run, so that the others know their last validation; Checkpoints last, with the complete state of all.
    ordered: list[Callback] = [Metrics(hardware, folder, started)]
    stops = callbacks.early_stop
    is_on = stops is not None and passes > stops.min_passes and not (sweep and stops.min_passes)
    ordered.append(EarlyStop(stops if is_on else None, config.max_time))
    if callbacks.causality is not None:
        ordered.append(CausalityCheck(folder, allow_leak))
    ordered.append(GarbageCollection())
    if callbacks.heads is not None:
        ordered.append(HeadMetrics(callbacks.heads))
    if callbacks.progress is not None:
        ordered.append(Progress(callbacks.progress))
    if callbacks.samples is not None:
        ordered.append(Samples(callbacks.samples, folder, seed))
    return Trainer(
        accelerator=hardware.accelerator,
        precision=hardware.precision,  # pyright: ignore[reportArgumentType] one of Lightning's
        strategy=make_strategy(config, resume),
        val_check_interval=config.val_check_interval * config.accumulate_grad_batches,  # in micro-batches
        check_val_every_n_epoch=None,  # by steps
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        plugins=[CheckpointFiles()],
        use_distributed_sampler=False,  # the data module gives each process its windows
        logger=[*make_loggers(logger, folder.absolute(), step=step, sweep=sweep), *added[1]],
        callbacks=[*ordered, *added[0], Checkpoints(folder, checkpoint, stop)],
        **{name: getattr(config, name) for name in PASSED_ON},
    )


def quiet_lightning() -> None:
    """No tips and warnings between our lines."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", ".*all_gather is deprecated")  # between torch 2.13 and Lightning 2.6
    warnings.filterwarnings("ignore", ".*LeafSpec.*", FutureWarning)  # between torch 2.13 and Lightning 2.6


def fit(
    trainer: Trainer,
    module: TrainingModule,
    data: TextDataModule,
    *,
    checkpoint: Path | None,
    settings: dict[str, Any],
    sample: str,
) -> None:
    """Trains from a checkpoint or from the start, validates at the end, and writes the summary.

    Args:
        settings: of the run, for the loggers.
        sample: the command that samples, such as "tril sample".

    Raises:
        RunRefused: the model sees the future, or a logger or a callback refuses its settings.
        NonFiniteError: a loss or a gradient is not finite; the summary says so.
        MemoryError: the memory does not suffice; the message names settings to lower.
    """
    configure_torch(Metrics.of(trainer).hardware.accelerator)
    try:
        with out_of_memory(data, module), gc_paused():
            start_loggers(trainer, settings)
            trainer.fit(module, data, ckpt_path=checkpoint)
            metrics = Metrics.of(trainer)
            if not metrics.val or metrics.val[-1]["step"] != trainer.global_step:  # no step was left
                trainer.validate(module, data, verbose=False)
        summarize(trainer, module, data, sample=sample, stopped=stop_reason(trainer))
    except Exception as error:  # not a stop by a signal, which an upload must not delay
        if isinstance(error, NonFiniteError):
            summarize(trainer, module, data, sample=sample, diverged=error)
        finish_loggers(trainer, failed=True)
        raise
    finish_loggers(trainer, failed=False)


@contextlib.contextmanager
def out_of_memory(data: TextDataModule, module: TrainingModule) -> Iterator[None]:
    """Raises MemoryError with the settings to lower if an allocation of the block fails."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not MEMORY.search(str(error)):
            raise
        config = module.model.config
        settings = f"data.batch_size={data.batch_size}, model.context_length={config.context_length}"
        accumulate = "trainer.accumulate_grad_batches makes up for a smaller batch"
        raise MemoryError(f"out of memory; lower {settings} or model.dim={config.dim} ({accumulate})") from None


def stop_reason(trainer: Trainer) -> str | None:
    """Why the run ended before trainer.max_steps, in words; None: it made all steps."""
    step, steps, metrics = trainer.global_step, trainer.max_steps, Metrics.of(trainer)
    if step >= steps:
        return None
    limit = _early_stop(trainer).limit(metrics.val, metrics.wall_seconds())
    return f"at step {step:,} of {steps:,} by {limit or 'a callback'}"


def no_step_left(trainer: Trainer, checkpoint: Mapping[str, Any]) -> str | None:
    """The setting by which a run that continues from `checkpoint` stops at once; None: it goes on.

    Args:
        trainer: with the settings and callbacks of the run, before `fit`.
        checkpoint: its content, with Lightning's entries.
    """
    state = checkpoint["callbacks"]["Metrics"]
    return _early_stop(trainer).limit(state["val"], state["wall_seconds"])


def _early_stop(trainer: Trainer) -> EarlyStop:
    return next(each for each in trainer.callbacks if isinstance(each, EarlyStop))  # pyright: ignore[reportAttributeAccessIssue] dynamic
