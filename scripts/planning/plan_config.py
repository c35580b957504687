"""The settings that only scripts/plan.py has; all others are those of train.py."""

from dataclasses import fields
from typing import Annotated

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import strict_settings

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, config=strict_settings())
class PlanConfig:
    """The comments in configs/plan.yaml describe the fields."""

    time: bool
    gpus: Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=1)]
    gpu: str
    gpu_memory: Positive
    mfu: Annotated[float, Field(gt=0, le=1)]
    link: Positive

    @field_validator("gpu")
    @classmethod
    def _known(cls, name: str) -> str:
        from tril.model.training.hardware import PEAK_TFLOPS, peak_flops

        if peak_flops(name) is None:
            known = ", ".join(words.replace("|", ", ") for words, tflops in PEAK_TFLOPS if tflops is not None)
            raise ValueError(f"gpu={name} has no known peak FLOP/s; choose one of {known}")
        return name


KEYS = tuple(field.name for field in fields(PlanConfig))


def parse(settings: dict) -> PlanConfig:
    """Checks the keys of `PlanConfig` in the composed settings. Raises ValueError for an invalid value."""
    return PlanConfig(**{key: settings[key] for key in KEYS if key in settings})
