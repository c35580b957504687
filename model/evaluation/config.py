"""The settings of an evaluation, without torch, so that a command can check them before it loads anything."""

from typing import Literal

from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.generation.config import CKPT, DEVICE


@dataclass(frozen=True, config=strict_settings())
class EvaluateConfig:
    """What is measured of a checkpoint: the text of its run, or a text of `data`."""

    ckpt: str = CKPT
    other: str | None = setting(None, "a second checkpoint, compared on the same text")
    part: Literal["val", "all"] = setting("val", "of the text: val, its validation part, or all")
    device: str = DEVICE
    out: str | None = setting(None, "folder for the files; null: evaluation/ in the run's folder")
