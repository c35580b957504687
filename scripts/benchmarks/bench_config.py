"""The settings that only scripts/bench.py has; all others are those of train.py."""

import re
from dataclasses import fields
from typing import Annotated

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import nearest, strict_settings
from tril.model.runs import find_checkpoint
from tril.scripts.benchmarks.processes import check_program

PARTS = {  # name: module of scripts.benchmarks, its function
    "train": ("training_speed", "train"),
    "outside": ("training_speed", "outside"),
    "decode": ("decoding", "run"),
    "data": ("preparing", "run"),
    "start": ("starting", "run"),
    "attention": ("attention_speed", "run"),
    "cost": ("cost", "run"),
}
TEXTS = ("vs", "vs_dir", "vs_pattern", "vs_sample", "ckpt", "out")  # keys whose value is passed on exactly as typed
COUNT = "{n}"  # stands for the number of new tokens in vs_sample


@dataclass(frozen=True, config=strict_settings())
class BenchConfig:
    """The comments in configs/bench.yaml describe the fields."""

    what: list[str]
    repeats: Annotated[int, Field(ge=1)]
    warmup: Annotated[int, Field(ge=0)]
    steps: Annotated[int, Field(ge=1)]
    vs: str | None
    vs_dir: str | None
    vs_pattern: re.Pattern[str]
    vs_tokens: Annotated[int, Field(ge=1)] | None
    vs_sample: str | None
    ckpt: str | None
    out: str | None

    @field_validator("what", mode="before")
    @classmethod
    def _known_parts(cls, what: object) -> list:
        names = what if isinstance(what, list) else [what]
        for name in names:
            if not isinstance(name, str) or name not in PARTS:
                raise ValueError(f"what={name} is not a part of the benchmark{nearest(str(name), PARTS)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"what={names} must name each part once, and at least one; choose from {', '.join(PARTS)}")
        return names

    @model_validator(mode="after")
    def _startable(self) -> "BenchConfig":
        for key, command, part in (("vs", self.vs, "train"), ("vs_sample", self.vs_sample, "decode")):
            if command is None:
                continue
            if part not in self.what:
                raise ValueError(f"{key} is timed by what={part}, but what={','.join(self.what)}; add {part}")
            check_program(key, command, self.vs_dir)
        if self.vs_sample is not None and COUNT not in self.vs_sample:
            raise ValueError(f"vs_sample={self.vs_sample} lacks {COUNT}; write it in place of the number of new tokens")
        if (n := self.vs_pattern.groups) != 1:
            remedy = "it needs one, around the milliseconds: 'time ([0-9.]+)ms'"
            raise ValueError(f"vs_pattern={self.vs_pattern.pattern} has {n} groups; {remedy}")
        if self.ckpt is not None:
            find_checkpoint(self.ckpt)
        return self


KEYS = tuple(field.name for field in fields(BenchConfig))


def parse(settings: dict) -> BenchConfig:
    """Checks the keys of `BenchConfig` in the composed settings, without importing torch.

    Raises:
        ValueError: a value is invalid, or a command cannot be started.
        OSError: there is no checkpoint `ckpt`.
    """
    return BenchConfig(**{key: settings[key] for key in KEYS if key in settings})
