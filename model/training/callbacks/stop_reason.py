"""Why a run made fewer steps than planned, and whether a checkpoint leaves no step to make."""

from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.trainer.states import RunningStage


def stop_reason(trainer: Trainer) -> str | None:
    """Why the run ended before trainer.max_steps, in words; None: it made all steps."""
    step, steps, epochs = trainer.global_step, trainer.max_steps, trainer.max_epochs
    if step >= steps:
        return None
    reason = "a callback stopped it"
    if epochs is not None and 0 < epochs <= trainer.current_epoch:
        reason = f"trainer.max_epochs={epochs} is reached"
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if isinstance(callback, EarlyStopping) and callback.wait_count >= callback.patience:
            best = f"below {float(callback.best_score):.4f} in {callback.wait_count} validations"
            reason = f"{callback.monitor} is not {best} (callbacks.early_stop.patience)"
        elif isinstance(callback, Timer) and (callback.time_remaining() or 0) < 0:
            reason = f"trainer.max_time={limit_of(callback)} is over"
    return f"at step {step:,} of {steps:,}: {reason}"


def no_step_left(trainer: Trainer, checkpoint: Mapping[str, Any]) -> str | None:
    """The setting by which a run that continues from `checkpoint` stops at once, such as a time that is over.

    Args:
        trainer: with the settings and callbacks of the run, before `fit`.
        checkpoint: its content, with Lightning's entries.

    Returns:
        "trainer.max_time=00:00:00:10"; None: the run goes on.
    """
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] dynamic
        state = checkpoint["callbacks"].get(callback.state_key)
        if isinstance(callback, EarlyStopping) and state and state["wait_count"] >= callback.patience:
            return f"callbacks.early_stop.patience={callback.patience}"
        if isinstance(callback, Timer) and state and callback._duration is not None:
            if state["time_elapsed"][RunningStage.TRAINING.value] >= callback._duration:
                return f"trainer.max_time={limit_of(callback)}"
    loops = checkpoint["loops"]["fit_loop"]
    epochs = loops["epoch_progress"]["current"]["processed"] + loops["epoch_loop.batch_progress"]["is_last_batch"]
    if trainer.max_epochs is not None and 0 < trainer.max_epochs <= epochs:
        return f"trainer.max_epochs={trainer.max_epochs}"
    return None


def limit_of(timer: Timer) -> str:
    """DD:HH:MM:SS"""
    minutes, seconds = divmod(round(timer._duration or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return "{:02}:{:02}".format(*divmod(hours, 24)) + f":{minutes:02}:{seconds:02}"
