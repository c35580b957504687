"""The lightning.Trainer of a run, with its callbacks and loggers, and the training itself."""

import contextlib
import gc
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loggers import Logger

from tril.data.datamodule import TextDataModule
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.callbacks.output import HeadMetrics, Progress, Samples
from tril.model.training.checkpoints import CheckpointFiles, Checkpoints, Stop
from tril.model.training.errors import NonFiniteError
from tril.model.training.hardware import Hardware, configure_torch
from tril.model.training.loggers import finish_loggers, make_loggers, start_loggers
from tril.model.training.module import TrainingModule
from tril.model.training.parallel import make_strategy
from tril.model.training.settings import CallbacksConfig, CheckpointConfig, LoggerConfig, TrainerConfig
from tril.model.training.summary import summarize

PASSED_ON = ("max_steps", "accumulate_grad_batches", "log_every_n_steps", "num_nodes", "devices")  # to the Trainer
PASSED_ON += ("limit_val_batches", "gradient_clip_val")
# torch's CPU allocator (Linux and macOS, then Windows) and MPS; on CUDA it has an exception of its own.
MEMORY = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|MPS backend out of memory")


class EarlyStop(EarlyStopping):
    """Lightning's, which ends a run after `patience` validations without a lower loss.

    A resumed run may have another patience than the one before, and makes no step if that has run out.
    """

    def __init__(self, patience: int) -> None:
        super().__init__("val/loss", patience=patience, check_finite=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    @property
    def limit(self) -> str | None:
        """The setting by which the run ends; None: it goes on."""
        return "callbacks.early_stop.patience" if self.wait_count >= self.patience else None

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        trainer.should_stop = trainer.should_stop or self.limit is not None


class MaxTime(Timer):
    """Lightning's, which ends a run after DD:HH:MM:SS of training, validation included."""

    def __init__(self, duration: str) -> None:
        super().__init__(duration, verbose=False)

    @property
    def limit(self) -> str | None:
        """The setting by which the run ends; None: it goes on."""
        return "trainer.max_time" if (self.time_remaining() or 0) <= 0 else None


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
    if stops is not None and passes > stops.min_passes and not (sweep and stops.min_passes):
        ordered.append(EarlyStop(stops.patience))
    if config.max_time is not None:
        ordered.append(MaxTime(config.max_time))
    if callbacks.causality is not None:
        ordered.append(CausalityCheck(folder, allow_leak))
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
        with out_of_memory(data, module), frozen_objects():
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


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """In the block Python's garbage collector does not search what exists when it begins, such as all of torch."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def limit_of(trainer: Trainer) -> str | None:
    """The setting by which a run ends before trainer.max_steps; None: it goes on."""
    stops = [each for each in trainer.callbacks if isinstance(each, EarlyStop | MaxTime)]  # pyright: ignore[reportAttributeAccessIssue] dynamic
    return next(filter(None, (each.limit for each in stops)), None)


def stop_reason(trainer: Trainer) -> str | None:
    """Why the run ended before trainer.max_steps, in words; None: it made all steps."""
    step, steps = trainer.global_step, trainer.max_steps
    return None if step >= steps else f"at step {step:,} of {steps:,} by {limit_of(trainer) or 'a callback'}"


def no_step_left(trainer: Trainer, checkpoint: Mapping[str, Any]) -> str | None:
    """The setting by which a run that continues from `checkpoint` stops at once; None: it goes on.

    Args:
        trainer: with the settings and callbacks of the run, before `fit`.
        checkpoint: its content, with Lightning's entries.
    """
    for each in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if isinstance(each, EarlyStop | MaxTime) and each.state_key in checkpoint["callbacks"]:
            each.load_state_dict(checkpoint["callbacks"][each.state_key])
    return limit_of(trainer)
