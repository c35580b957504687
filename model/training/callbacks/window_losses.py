"""The validation loss of every window, kept for paired comparisons of runs."""

from pathlib import Path

import numpy as np
from lightning import Callback, LightningModule, Trainer

from tril.model.training.callbacks.metrics import Metrics


class WindowLosses(Callback):
    """Keeps the validation loss of every window, of the newest and of the best validation: what a paired comparison of two runs needs.

    windows_last.npz and windows_best.npz hold step, context_length, and of each window, in the order of the text, nll (nats, summed over
    its targets) and targets (how many).
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = Metrics.of(trainer)
        names = ("last", "best") if metrics.val[-1] == metrics.best() else ("last",)
        nll, targets = pl_module.val_windows.numpy()
        sizes = {"step": trainer.global_step, "context_length": pl_module.model.config.context_length}
        arrays = sizes | {"nll": nll, "targets": targets.astype(int)}
        for name in names:
            part = self.folder / f".windows_{name}.part.npz"
            np.savez(part, **arrays)
            part.replace(self.folder / f"windows_{name}.npz")
