"""The scores and the attention maps of every head while a run trains."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, Trainer

from tril.model.atomic_files import write_text
from tril.model.config import GPTConfig
from tril.model.formats import csv_text
from tril.model.heads.attention_maps import TokenWindows, attention_maps
from tril.model.heads.records import (
    COPY_LOSSES,
    HEAD_SCORES,
    UNIFORM,
    all_heads,
    compress_maps,
    head_name,
    map_text,
    save_maps,
    thin_out,
)
from tril.model.heads.scores import HeadScores, alphabet_of, score_heads
from tril.model.masks import document_options
from tril.model.training.module import TrainingModule

# What is measured at each recorded step: little, so that all of them take less than 1 % of the default run.
WINDOWS, WINDOW_TOKENS = 2, 128  # of the validation part
SEQUENCES, SEQUENCE_TOKENS = 4, 64  # random ones, each repeated once


class HeadRecorder(Callback):
    """Measures every head before the first step, after the steps 1, 2, 4, 8, ..., and at every validation.

    heads.csv has a row for each of these steps and heads, and one for uniform weights: the scores of
    `tril.model.heads.scores`, and the losses of the two copies of repeated random sequences, which are those of the
    step. head_maps.npz has attention maps of a short text, see `tril.model.heads.records`.

    The state has the content of both files, so a resumed run has what its checkpoint had, and replaces the files with
    its first record. Neither weights nor random states change.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._step = -1  # the last recorded one
        self._lines = ""  # of heads.csv so far
        self._maps: dict[int, np.ndarray] = {}  # step -> see `compress_maps`

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        data = pl_module.data
        ids, targets = (each[:, :WINDOW_TOKENS] for each in data.first_val_windows(WINDOWS))
        self.text = TokenWindows(ids, targets, pl_module.document_eot)
        self.alphabet = alphabet_of(data.tokenizer, data.meta["eot_id"])  # of random sequences

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        if trainer.global_step == 0:
            self._record(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TrainingModule, outputs, batch, batch_idx: int) -> None:
        if trainer.global_step & (trainer.global_step - 1) == 0:
            self._record(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        self._record(trainer, pl_module)

    def _record(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        step, model = trainer.global_step, pl_module.model
        if step == self._step or model.config.n_heads == 0:
            return
        self._step = step
        if not trainer.is_global_zero:
            return
        options = {"seed": 0, "n_repeats": SEQUENCES, "max_length": SEQUENCE_TOKENS}
        scores = score_heads(model, self.text, alphabet=self.alphabet, **options)
        shown = map_text(self.text.ids[0].tolist(), model.config.context_length)
        ids = torch.tensor([shown], device=model.embed.weight.device)  # (1, T)
        maps = attention_maps(model, ids, **document_options(ids, self.text.document_eot))[:, 0]  # (L, H, T, T)
        lines = csv_text(rows_of(step, model.config, scores))
        self._lines += lines.partition("\n")[2] if self._lines else lines
        self._maps[step] = compress_maps(maps.float().cpu().numpy())
        thin_out(self._maps)
        write_text(self.folder / HEAD_SCORES, self._lines)
        save_maps(self.folder, shown, maps.shape, self._maps)

    def state_dict(self) -> dict[str, Any]:
        maps = {step: torch.from_numpy(each) for step, each in self._maps.items()}
        return {"step": self._step, "lines": self._lines, "maps": maps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._lines = state["step"], state["lines"]
        self._maps = {step: each.numpy() for step, each in state["maps"].items()}


def rows_of(step: int, config: GPTConfig, scores: HeadScores) -> list[dict[str, Any]]:
    """The rows of heads.csv of one step; a score that is not a number is an empty cell."""
    rows = {head_name(head): {name: x[head].item() for name, x in scores.heads.items()} for head in all_heads(config)}
    rows[UNIFORM] = scores.uniform
    losses = dict(zip(COPY_LOSSES, scores.copy_losses, strict=True))
    return [
        {"step": step, "head": head, **{name: f"{x:.5g}" if math.isfinite(x) else "" for name, x in values.items()}}
        for head, values in ((head, row | losses) for head, row in rows.items())
    ]
