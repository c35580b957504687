"""The settings of an evaluation, without torch, so that a command can check them before it loads anything."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from tril.data.settings import setting, strict_settings
from tril.model.generation.config import CKPT, DEVICE

OF_DATA = "tasks=null"


@dataclass(frozen=True, config=strict_settings())
class EvaluateConfig:
    """What is measured of a checkpoint: a text of `data`, or instead `tasks`."""

    ckpt: str = CKPT
    other: str | None = setting(None, "a second checkpoint, compared on the same text", needs=OF_DATA)
    part: Literal["val", "all"] = setting("val", "of the text: val, its validation part, or all", needs=OF_DATA)
    tasks: str | None = setting(
        None, "instead, tasks and groups of lm-evaluation-harness, separated by commas; * stands for any text"
    )
    include_path: str | None = setting(
        None, "a folder with tasks of your own; a task can contain Python code, which runs", needs="tasks"
    )
    num_fewshot: Annotated[int, Field(ge=0)] | None = setting(
        None, "solved examples before each question; null: as the task says", needs="tasks"
    )
    limit: Annotated[int, Field(ge=1)] | None = setting(
        None, "at most this many examples of each task, the first ones; null: all", needs="tasks"
    )
    device: str = DEVICE
    out: str | None = setting(None, "folder for the files; null: evaluation/ in the run's folder")
