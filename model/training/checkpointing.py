"""Checkpoints of a run: written whole or not at all, and still its own after its folder was moved."""

from pathlib import Path

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from tril.model.checkpoint import write
from tril.model.runs import moved


class WholeFiles(TorchCheckpointIO):
    """Lightning's own writes to /tmp and moves the file from there. Where that is another file system, moving is copying, and a full disk or
    a killed process would leave half of it in the place of the last good one."""

    def save_checkpoint(self, checkpoint: dict, path: str | Path, storage_options=None) -> None:
        write(path, checkpoint)


class Checkpoint(ModelCheckpoint):
    """Lightning's, which forgets the best loss so far when the folder has another name. Here it is forgotten only where the file is not in
    the folder, since the run goes on in a new one."""

    def load_state_dict(self, state_dict: dict) -> None:
        state = moved(state_dict, state_dict["dirpath"], self.dirpath)
        if Path(state["best_model_path"]).is_file():
            super().load_state_dict(state)
