"""Runs Python's garbage collector at validations only."""

import gc

from lightning import Callback, LightningModule, Trainer


class GarbageCollection(Callback):
    """Runs Python's garbage collector at validations only, since a collection delays a step.

    Objects that exist when training starts, such as those of the libraries, are never searched.
    """

    def __init__(self) -> None:
        self._was_enabled = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
