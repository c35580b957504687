"""`explain` turns what pydantic refuses into one line."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from tril.data.settings import explain, strict_settings


@dataclass(frozen=True, config=strict_settings("optim.schedule"))
class Schedule:
    kind: Literal["cosine", "linear"]
    steps: Annotated[int, Field(ge=1)] = 1
    rate: float | None = None
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    names: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def check(self):
        if self.steps == 13:
            raise ValueError("optim.schedule.steps=13 must not be 13; use 12 or 14")
        return self


@dataclass(frozen=True, config=strict_settings())
class TopLevel:
    device: str


def refusal(cls, **values) -> str:
    with pytest.raises(ValidationError) as error:
        cls(**values)
    return explain(error.value)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"kind": "step"}, "optim.schedule.kind=step must be 'cosine' or 'linear'"),
        ({"steps": 0}, "optim.schedule.steps=0 must be greater than or equal to 1"),
        ({"steps": "8"}, "optim.schedule.steps='8' must be a valid integer"),  # the quotes tell it from 8
        ({"steps": True}, "optim.schedule.steps=true must be a valid integer"),  # as in yaml
        ({"steps": None}, "optim.schedule.steps=null must be a valid integer"),
        ({"rate": "fast"}, "optim.schedule.rate='fast' must be a valid number"),
        ({"weights": {"a": -1.0}}, "optim.schedule.weights.a=-1.0 must be greater than 0"),
        ({"names": ["x", 3]}, "optim.schedule.names.1=3 must be a valid string"),
        ({"step": 3}, "optim.schedule.step is unknown"),
        ({"steps": 13}, "optim.schedule.steps=13 must not be 13; use 12 or 14"),  # without pydantic's prefix
    ],
)
def test_a_refused_setting_is_named_with_its_value_and_limit(values, message):
    assert refusal(Schedule, **{"kind": "cosine", **values}) == message


def test_a_missing_setting_is_named():
    assert refusal(Schedule) == "optim.schedule.kind is missing"


def test_several_refused_settings_are_one_line():
    assert refusal(Schedule, kind="step", steps=0) == (
        "optim.schedule.kind=step must be 'cosine' or 'linear'; "
        "optim.schedule.steps=0 must be greater than or equal to 1"
    )
