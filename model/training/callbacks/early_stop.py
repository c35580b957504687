"""Stops a run whose validation loss no longer falls."""

from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping

from tril.model.training.module import TrainingModule


class EarlyStop(EarlyStopping):
    """Lightning's EarlyStopping on val/loss, for runs that read their text often. best.ckpt holds the best weights.

    Args:
        patience: consecutive validations without a lower loss, after which the run stops.
        min_delta: a loss counts as lower if it is lower by more than this, nats per token.
        min_passes: a run of at most so many passes over its text is not stopped.
    """

    def __init__(self, patience: int, min_delta: float, min_passes: float) -> None:
        super().__init__("val/loss", min_delta=min_delta, patience=patience, check_on_train_epoch_end=False)
        self.min_passes, self._is_on = min_passes, False

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """A run that had stopped makes no step when it is resumed, unless it gets more patience."""
        batches = trainer.max_steps * trainer.accumulate_grad_batches
        self._is_on = batches / trainer.num_training_batches > self.min_passes
        trainer.should_stop = trainer.should_stop or self._is_on and self.wait_count >= self.patience

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if self._is_on:
            super().on_validation_end(trainer, pl_module)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # the one of this run's settings
