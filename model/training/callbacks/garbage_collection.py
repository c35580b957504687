"""Python's garbage collector runs at validations only."""

import gc

from lightning import Callback, LightningModule, Trainer


class GarbageCollection(Callback):
    """Lets Python look for unreachable objects at validations alone: at any other moment the search, through all the objects of the
    libraries, would hold up a step. Those that are there when training starts are not searched at all.
    """

    def __init__(self):
        self._running = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._running = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.collect()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        gc.unfreeze()
        if self._running:
            gc.enable()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)
