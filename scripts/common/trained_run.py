"""What `tril.train(...)` returns: a finished run, read from its folder."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from tril.model.runs import SETTINGS, SUMMARY
from tril.scripts.common.resume import literal
from tril.scripts.common.saved_settings import read_settings

if TYPE_CHECKING:
    import torch

    from tril.model.generation.language_model import LanguageModel

METRICS = "csv/version_0/metrics.csv"


@dataclass(frozen=True)
class TrainedRun:
    """A finished run.

    Attributes:
        folder: of the run, absolute. The other attributes are read from its files at each access.
    """

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The results: the content of summary.json."""
        return json.loads((self.folder / SUMMARY).read_text(encoding="utf-8"))

    @property
    def config(self) -> DictConfig:
        """The settings of the run, resolved: the content of config.yaml, as in `run.config.model.n_heads`."""
        config = DictConfig(literal(read_settings(self.folder / SETTINGS)))
        OmegaConf.set_readonly(config, True)
        return config

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.csv, each without its empty cells. "step" is an int.

        A step has a row for each kind of metrics, such as "train/loss" or "val/loss".
        """
        with (self.folder / METRICS).open(encoding="utf-8", newline="") as file:
            rows = [{key: float(text) for key, text in row.items() if text} for row in csv.DictReader(file)]
        return [row | {"step": int(row["step"])} for row in rows]

    def load(self, device: "torch.device | str" = "cpu") -> "LanguageModel":
        """The model of the best validation with its tokenizer, in evaluation mode; see `tril.model.load`."""
        from tril.model.checkpoint import load

        return load(self.folder, device)
