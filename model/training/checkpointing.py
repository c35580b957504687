"""Checkpoint files of a run: atomic writes, and folders that can be moved."""

from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tril.model.checkpoint import write
from tril.model.runs import relocate


class WholeFiles(TorchCheckpointIO):
    """Writes checkpoints atomically.

    Lightning writes to /tmp and moves the file. If that is another file system, moving is copying: a full disk or a
    killed process replaces the previous checkpoint by a truncated one.
    """

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options=None) -> None:
        write(path, checkpoint)

    def load_checkpoint(self, path: str | Path, map_location=None, weights_only: bool | None = True) -> dict:
        """Never unpickles code, whatever Lightning's default is."""
        return torch.load(path, map_location=map_location or "cpu", weights_only=True)


class Checkpoint(ModelCheckpoint):
    """ModelCheckpoint that remembers the best loss of a run whose folder was moved or copied.

    Lightning drops it if the folder has another name. This class drops it only if the folder lacks the best checkpoint,
    because the run continues in a new folder.
    """

    def load_state_dict(self, state_dict: dict) -> None:
        state = relocate(state_dict, state_dict["dirpath"], str(self.dirpath))
        if Path(state["best_model_path"]).is_file():
            super().load_state_dict(state)
