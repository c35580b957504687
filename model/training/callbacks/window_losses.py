"""Saves the validation losses of all windows and documents, for paired comparisons of runs."""

from pathlib import Path
from typing import Any

import numpy as np
from lightning import Callback, Trainer

from tril.model.atomic_files import atomic_path
from tril.model.training.callbacks.metrics import Metrics
from tril.model.training.module import TrainingModule


class WindowLosses(Callback):
    """Saves the losses of every window and document, of the last and of the best validation.

    windows_last.npz and windows_best.npz hold `step`, `context_length`, and for each window in the order of the text
    `nll` (nats, summed over its targets) and `targets` (their number); `document_nll` and `document_targets` are the
    same for each document. A target belongs to the document of its input. Data without documents have no such arrays.
    Of several sources, the windows and documents of each follow those of the one before, in the order of their names.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if not trainer.is_global_zero:
            return
        metrics = Metrics.of(trainer)
        names = ("last", "best") if metrics.val[-1] == metrics.best() else ("last",)
        nll, targets = pl_module.val_windows.numpy()
        arrays: dict[str, Any] = {"nll": nll, "targets": targets.astype(int)} | document_losses(pl_module)
        step, context_length = trainer.global_step, pl_module.model.config.context_length
        for name in names:
            with atomic_path(self.folder / f"windows_{name}.npz") as part, part.open("wb") as file:
                np.savez(file, step=step, context_length=context_length, **arrays)


def document_losses(module: TrainingModule) -> dict[str, np.ndarray]:
    """Nats and number of targets of each document in the last validation, (D,) each."""
    if module.val_documents is None:
        return {}
    nll = module.val_nll.numpy()  # (M,)
    documents = module.val_documents(*module.val_targets)  # (M,)
    return {"document_nll": np.bincount(documents, nll), "document_targets": np.bincount(documents)}
