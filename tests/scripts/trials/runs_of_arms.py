"""Stands in for the training process of a run: writes what a run leaves, with chosen losses."""

import json
from pathlib import Path

import numpy as np

TARGETS = np.full(12, 50)  # of 12 documents, one window each


class Trainer:
    """Replaces `run_process.spawn`.

    Attributes:
        losses: of the name of the arm and the seed: the mean loss, or a failure (status, last line of the log).
        certificate: of the runs.
        trained: names and seeds of the runs in the order of their start.
    """

    def __init__(self, losses):
        self.losses, self.trained, self.certificate = losses, [], "certified"

    def __call__(self, arguments, log, lock):
        overrides = arguments[2:]
        seed = int(next(text for text in overrides if text.startswith("seed=")).partition("=")[2])
        arm = "candidate" if "model.n_heads=2" in overrides else "baseline"
        self.trained.append(f"{arm} {seed}")
        loss = self.losses(arm, seed)
        if isinstance(loss, tuple):
            log.write_text(f"model ...\n{loss[1]}\n")
            return loss[0]
        write_finished(log.parent, loss, self.certificate)
        return 0


def write_finished(folder: Path, loss: float, certificate: str) -> None:
    """What the referee reads of a finished run."""
    nll = {"nll": loss * TARGETS, "targets": TARGETS, "document_nll": loss * TARGETS, "document_targets": TARGETS}
    np.savez(folder / "windows_last.npz", step=5, context_length=50, **nll)
    summary = {"final_val_loss": loss, "final_val_bpb": loss / 2, "seconds": 10.0, "data_fingerprint": "a"}
    summary |= {"val_bytes_per_token": 2.0, "causality": certificate}
    finite = {name: None if value != value else value for name, value in summary.items()}
    (folder / "summary.json").write_text(json.dumps(finite))
