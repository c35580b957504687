"""Why a run made fewer steps than planned, and whether a checkpoint leaves no step to make."""

from collections.abc import Mapping
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.trainer.states import RunningStage

from tril.model.training.callbacks.early_stop import EarlyStop


def stop_reason(trainer: Trainer) -> str | None:
    """Why the run ended before trainer.max_steps, in words; None: it made all steps."""
    step, steps = trainer.global_step, trainer.max_steps
    if step >= steps:
        return None
    if (reason := EarlyStop.reason(trainer)) is not None:
        return reason
    stopped = f"at step {step:,} of {steps:,}: "
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return stopped + " ".join(callback.stopping_reason_message.split())
        if isinstance(callback, Timer) and is_over(callback, callback.time_elapsed()):
            return f"{stopped}trainer.max_time={limit_of(callback)} is over"
    epochs = trainer.max_epochs
    if epochs is not None and 0 < epochs <= trainer.current_epoch:
        return f"{stopped}trainer.max_epochs={epochs} is reached"
    return f"{stopped}a callback stopped it"


def no_step_left(trainer: Trainer, checkpoint: Mapping[str, Any]) -> str | None:
    """The setting by which a run that continues from `checkpoint` stops at once, such as a time that is over.

    Args:
        trainer: with the settings and callbacks of the run, before `fit`.
        checkpoint: its content, with Lightning's entries.

    Returns:
        "trainer.max_time=00:00:00:10"; None: the run goes on.
    """
    states = checkpoint["callbacks"]
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] dynamic
        state = states.get(callback.state_key)
        if state is None:
            continue
        if isinstance(callback, EarlyStop) and state["wait_count"] >= callback.patience:
            return f"callbacks.early_stop.patience={callback.patience}"
        if isinstance(callback, Timer) and is_over(callback, state["time_elapsed"][RunningStage.TRAINING.value]):
            return f"trainer.max_time={limit_of(callback)}"
    loops = checkpoint["loops"]["fit_loop"]
    epochs = loops["epoch_progress"]["current"]["processed"] + loops["epoch_loop.batch_progress"]["is_last_batch"]
    if trainer.max_epochs is not None and 0 < trainer.max_epochs <= epochs:
        return f"trainer.max_epochs={trainer.max_epochs}"
    return None


def is_over(timer: Timer, seconds: float) -> bool:
    return timer._duration is not None and seconds >= timer._duration


def limit_of(timer: Timer) -> str:
    """DD:HH:MM:SS"""
    minutes, seconds = divmod(round(timer._duration or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return "{:02}:{:02}".format(*divmod(hours, 24)) + f":{minutes:02}:{seconds:02}"
