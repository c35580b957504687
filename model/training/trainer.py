"""The lightning.Trainer of a run, with its callbacks and loggers, and the training itself."""

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.loggers import Logger

from tril.data.datamodule import TextDataModule
from tril.data.settings import one_line, unflatten
from tril.model.checkpoint import Checkpoint, code_sha256
from tril.model.runs import SUMMARY, Run, in_sweep, is_resumable
from tril.model.training.callbacks.causality_check import CausalityCheck
from tril.model.training.callbacks.heads import HeadRecorder
from tril.model.training.callbacks.metrics import Metrics, NonFiniteError
from tril.model.training.callbacks.output import Progress, Samples
from tril.model.training.checkpoints import CheckpointFiles, Checkpoints
from tril.model.training.hardware import compiler_failure
from tril.model.training.loggers import finished_loggers
from tril.model.training.module import TrainingModule
from tril.model.training.settings import TrainingConfig, UserError
from tril.model.training.summary import summarize


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
    data: TextDataModule,
    *,
    started: float = 0.0,
    planner: Callback | None = None,
    added: Sequence[Callback | Logger] = (),
) -> Trainer:
    """The Trainer of a run, with its callbacks and loggers.

    A run that would read its text often may stop early, unless it belongs to a sweep, whose runs are compared at equal
    lengths. With `min_passes` of 0, every run may.

    Args:
        folder: of the run.
        started: time.perf_counter() at the start of the process.
        planner: plans the steps of a run that ends at a time.
        added: further callbacks and loggers.
    """
    # No tips and warnings between our lines.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", ".*all_gather is deprecated|.*LeafSpec")  # between torch 2.13 and Lightning 2.6

    chosen, settings, hardware, early = config.callbacks, config.trainer, config.hardware, config.callbacks.early_stop
    assert hardware is not None
    metrics = Metrics(hardware, folder, started)
    passes = config.train_tokens() / data.meta["counts"]["train"]["tokens"]
    may_stop = early and passes > early.min_passes and not (early.min_passes and in_sweep(folder))
    # The order in which Lightning calls them: Metrics first, since the others show what it measured; then what may end
    # the run, so that the others know their last validation; Checkpoints last, with the complete state of all.
    callbacks = [
        metrics,
        planner,
        EarlyStop(early.patience) if early and may_stop else None,
        CausalityCheck(folder, config.causality.allow_leak) if chosen.causality else None,
        HeadRecorder(folder) if chosen.heads else None,
        Progress(chosen.progress) if chosen.progress else None,
        Samples(chosen.samples, folder, config.top.seed) if chosen.samples else None,
        *(each for each in added if isinstance(each, Callback)),
        Checkpoints(folder, config.checkpoint),
    ]
    changed: dict[str, Any] = {
        "accelerator": hardware.accelerator,
        "precision": hardware.precision,
        "val_check_interval": settings.val_check_interval * settings.accumulate_grad_batches,  # in micro-batches
    }
    return Trainer(
        **vars(settings) | changed,
        check_val_every_n_epoch=None,  # by steps
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
        default_root_dir=folder,
        plugins=[CheckpointFiles()],
        use_distributed_sampler=False,  # the data module gives each process its windows
        logger=[metrics.run_log, *(each for each in added if isinstance(each, Logger))],
        callbacks=[callback for callback in callbacks if callback is not None],
    )


def fit(trainer: Trainer, module: TrainingModule, checkpoint: Checkpoint | None) -> None:
    """Trains from a checkpoint or from the start, validates at the end, and writes the summary.

    Raises:
        UserError: the model sees the future, a logger or a callback refuses its settings, a loss or a gradient is not
            finite (the summary says so), torch.compile fails, a file of the run cannot be written, or the checkpoint
            does not fit the run.
        Stopped: a signal ended the run.
    """
    run, settings = Run(Path(trainer.default_root_dir)), unflatten(module.payload["settings"])
    with finished_loggers(trainer):
        try:
            if trainer.is_global_zero:
                (run.folder / SUMMARY).unlink(missing_ok=True)  # which marks a finished run
                run.write_settings(settings)
                start_loggers(trainer.loggers, settings)
            trainer.fit(module, module.data, ckpt_path=checkpoint and checkpoint.path)
            last = Metrics.of(trainer).last("val/loss")
            if last is None or last["step"] != trainer.global_step:  # no step was left
                trainer.validate(module, module.data, verbose=False)
            summarize(trainer, module, stopped=stop_reason(trainer))
        except SystemExit as ended:
            if isinstance(ended.__context__, KeyboardInterrupt):  # Lightning exits with 1 after a second Ctrl-C
                raise KeyboardInterrupt from None
            raise
        except NonFiniteError as error:  # in all processes, of which one says so
            summarize(trainer, module, diverged=str(error))
            if not trainer.is_global_zero:
                sys.exit()  # Lightning kills rank 0 when another rank ends with another status
            raise
        except (UserError, BrokenPipeError):
            raise
        except OSError as error:
            remedy = f"continue with resume={run.folder}" if is_resumable(run.folder) else "start again"
            raise UserError(f"{one_line(str(error))}; mend the cause, such as a full disk, and {remedy}") from error
        except Exception as error:
            if failure := compiler_failure(error):
                raise UserError(failure) from error
            if checkpoint is None or trainer.global_step > (checkpoint.step or 0):
                raise
            cause = f"{checkpoint.path} does not go on ({one_line(f'{type(error).__name__}: {error}')})"
            raise UserError(f"{cause}; use another checkpoint of its folder") from error


def start_loggers(loggers: Sequence[Logger], settings: dict[str, Any]) -> None:
    """Gives the settings to the loggers. Raises UserError if one does not start, such as without an account."""
    for logger in loggers:
        try:
            logger.log_hyperparams(settings | {"code": code_sha256()[:12]})
        except Exception as error:
            message = f"{type(logger).__name__} does not start: {one_line(str(error))}"
            raise UserError(f"{message}; correct that, or leave it out with logger=csv") from error


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
