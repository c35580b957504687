"""The folder of a sweep as a setting, and the JSON files in it."""

import json
import math
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from tril.model.runs import SUMMARY

TUNE = "tune"  # key of the settings in sweep.json, and folder of the trials below that of the sweep
LOSSES = ("final_val_loss", "final_val_bpb", "best_val_loss", "best_val_bpb")


def read_json(path: Path) -> dict:
    """Raises ValueError for a damaged file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it, or move it away") from error


def read_summary(folder: Path) -> dict:
    """The summary.json of a run. JSON has no NaN: the null of a diverged loss becomes NaN again."""
    summary = read_json(folder / SUMMARY)
    return summary | {name: math.nan for name in LOSSES if name in summary and summary[name] is None}


def _require(value: object) -> object:
    if value is None:
        raise ValueError("dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest")
    return value


SweepDir = Annotated[str, BeforeValidator(_require)]
