"""Stops a run whose validation loss no longer falls."""

from typing import Annotated, Any

from lightning import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from pydantic import Field, validate_call

from tril.data.settings import strict_settings
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule


class EarlyStop(EarlyStopping):
    """Lightning's EarlyStopping on val/loss. The run ends as after its last step; best.ckpt holds the best weights.

    Args:
        patience: consecutive validations without a lower loss, after which the run stops.
        min_delta: a loss counts as lower if it is lower by more than this, nats per token.
    """

    @validate_call(config=strict_settings("callbacks.early_stop"))
    def __init__(
        self,
        patience: Annotated[int, Field(ge=1)] = 4,
        min_delta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0,
    ) -> None:
        super().__init__("val/loss", min_delta=min_delta, patience=patience, check_on_train_epoch_end=False)

    @staticmethod
    def reason(trainer: Trainer) -> str | None:
        """Why the run stopped early, in words; None: it did not, or has no such callback."""
        found = next((each for each in trainer.callbacks if isinstance(each, EarlyStop)), None)  # pyright: ignore[reportAttributeAccessIssue] dynamic
        if found is None or not found.is_exhausted or trainer.global_step >= trainer.max_steps:
            return None
        best = Metrics.of(trainer).best()
        return (
            f"at step {trainer.global_step:,} of {trainer.max_steps:,}: val/loss is not below {best['loss']:.4f}, "
            f"that of step {best['step']:,}, in {found.wait_count} validations (callbacks.early_stop.patience)"
        )

    @property
    def is_exhausted(self) -> bool:
        return self.wait_count >= self.patience

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """A run that had stopped makes no step when it is resumed, unless it gets more patience."""
        trainer.should_stop = trainer.should_stop or self.is_exhausted

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})  # the one of this run's settings
