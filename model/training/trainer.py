"""The lightning.Trainer of a run, with its callbacks and loggers, and the training itself."""

import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loggers import Logger

from tril.data.datamodule import TextDataModule
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.callbacks.heads import HeadRecorder
from tril.model.training.callbacks.metrics import Metrics, NonFiniteError
from tril.model.training.callbacks.output import Progress, Samples
from tril.model.training.checkpoints import CheckpointFiles, Checkpoints
from tril.model.training.hardware import configure_torch
from tril.model.training.loggers import finish_loggers, start_loggers
from tril.model.training.module import TrainingModule
from tril.model.training.settings import TrainingConfig
from tril.model.training.stop import StopAfterStep
from tril.model.training.summary import summarize

# torch's CPU allocator and MPS; on CUDA it has an exception of its own.
MEMORY = re.compile(r"DefaultCPUAllocator: can't allocate memory|MPS backend out of memory")


class EarlyStop(EarlyStopping):
    """Lightning's, which ends a run after `patience` validations without a lower loss.

    A resumed run may have another patience than the one before, and makes no step if that has run out.
    """

    def __init__(self, patience: int) -> None:
        super().__init__("val/loss", patience=patience, check_finite=False)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


def build_trainer(
    config: TrainingConfig,
    folder: Path,
    *,
    passes: float = 0.0,
    sweep: Path | None = None,
    started: float = 0.0,
    planner: Callback | None = None,
    added: tuple[Sequence[Callback], Sequence[Logger]] = ((), ()),
) -> Trainer:
    """The Trainer of a run, with its callbacks and loggers.

    Args:
        folder: of the run.
        passes: of the run over its text, which decide whether it may stop early.
        sweep: the folder of the run's sweep, whose runs are compared at equal lengths: one that would read its text
            often does not stop early, unless `min_passes` is 0; None: a single run.
        started: time.perf_counter() at the start of the process.
        planner: plans the steps of a run that ends at a time.
        added: further callbacks and loggers.
    """
    quiet_lightning()
    chosen, settings, hardware = config.callbacks, config.trainer, config.hardware
    assert hardware is not None
    # The order in which Lightning calls them: Metrics first, since the others show what it measured; then what may end
    # the run, so that the others know their last validation; Checkpoints last, with the complete state of all.
    metrics, stop = Metrics(hardware, folder, started), StopAfterStep()
    callbacks: list[Callback] = [metrics, stop]
    if planner is not None:
        callbacks.append(planner)
    if (early := chosen.early_stop) and passes > early.min_passes and not (sweep and early.min_passes):
        callbacks.append(EarlyStop(early.patience))
    if settings.max_time:
        callbacks.append(Timer(settings.max_time, verbose=False))
    if chosen.causality:
        callbacks.append(CausalityCheck(folder, config.causality.allow_leak))
    if chosen.heads:
        callbacks.append(HeadRecorder(folder))
    if chosen.progress:
        callbacks.append(Progress(chosen.progress))
    if chosen.samples:
        callbacks.append(Samples(chosen.samples, folder, config.top.seed))
    return Trainer(
        accelerator=hardware.accelerator,
        strategy=settings.strategy,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        precision=hardware.precision,  # pyright: ignore[reportArgumentType] one of Lightning's
        max_steps=settings.max_steps,
        accumulate_grad_batches=settings.accumulate_grad_batches,
        gradient_clip_val=settings.gradient_clip_val,
        val_check_interval=settings.val_check_interval * settings.accumulate_grad_batches,  # in micro-batches
        check_val_every_n_epoch=None,  # by steps
        limit_val_batches=settings.limit_val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=settings.log_every_n_steps,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        plugins=[CheckpointFiles()],
        use_distributed_sampler=False,  # the data module gives each process its windows
        logger=[metrics.run_log, *added[1]],
        callbacks=[*callbacks, *added[0], Checkpoints(folder, config.checkpoint, stop)],
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
        start_loggers(trainer, settings)
        trainer.fit(module, data, ckpt_path=checkpoint)
        last = Metrics.of(trainer).last("val/loss")
        if last is None or last["step"] != trainer.global_step:  # no step was left
            trainer.validate(module, data, verbose=False)
        summarize(trainer, module, data, sample=sample, stopped=stop_reason(trainer))
    except SystemExit as ended:
        if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning exits with 1 after a second Ctrl-C
            raise KeyboardInterrupt from None
        raise
    except Exception as error:  # not a stop by a signal, which an upload must not delay
        if isinstance(error, NonFiniteError):
            summarize(trainer, module, data, sample=sample, diverged=str(error))
        finish_loggers(trainer, failed=True)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or MEMORY.search(str(error)):
            config = module.model.config
            sizes = f"data.batch_size={data.batch_size}, model.context_length={config.context_length}"
            accumulate = "trainer.accumulate_grad_batches makes up for a smaller batch"
            raise MemoryError(f"out of memory; lower {sizes} or model.dim={config.dim} ({accumulate})") from None
        raise
    finish_loggers(trainer, failed=False)


def stop_reason(trainer: Trainer) -> str | None:
    """Why the run ended before trainer.max_steps, in words; None: it made all steps."""
    step, steps, limit = trainer.global_step, trainer.max_steps, "a callback"
    if step >= steps:
        return None
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if isinstance(callback, EarlyStop) and callback.wait_count >= callback.patience:
            limit = "callbacks.early_stop.patience"
        if isinstance(callback, Timer) and (callback.time_remaining() or 0) <= 0:
            limit = "trainer.max_time"
    return f"at step {step:,} of {steps:,} by {limit}"
