"""One default per setting: those of a dataclass or constructor are those of the yaml that ships with it."""

import dataclasses
import inspect

import pytest
import yaml
from pydantic_core import PydanticUndefined

from tril.data.config import SOURCES, DataConfig
from tril.data.tokenizer import TokenizerConfig
from tril.model.config import GPTConfig
from tril.model.training.optim import OptimConfig
from tril.model.training.schedule import ScheduleConfig
from tril.model.training.trainer_config import CausalityConfig, TopLevelConfig, TrainerConfig
from tril.scripts.common.cli import CONFIGS
from tril.scripts.common.targets import find_target

UNSET = object()


def read(name):
    return yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))


def defaults_of(kind) -> dict:
    """Default by name; UNSET for a required argument."""
    if hasattr(kind, "__pydantic_fields__"):
        fields = kind.__pydantic_fields__.items()
        pairs = {name: field.get_default(call_default_factory=True) for name, field in fields}
    else:
        pairs = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    required = (dataclasses.MISSING, inspect.Parameter.empty, PydanticUndefined)
    return {name: UNSET if any(value is none for none in required) else value for name, value in pairs.items()}


def plain(value):
    if dataclasses.is_dataclass(value):
        return {name: plain(item) for name, item in dataclasses.asdict(value).items()}
    return list(value) if isinstance(value, tuple) else value


STDLIB, TRAIN = read("data/stdlib.yaml"), read("train.yaml")
CALLBACKS = read("callbacks/default.yaml")
OWN = {name: entry for name, entry in CALLBACKS.items() if not entry["_target_"].endswith(".Checkpoint")}


@pytest.mark.parametrize(
    ("kind", "shipped"),
    [
        (GPTConfig, read("model/nano.yaml")),
        (OptimConfig, read("optim/muon.yaml")),
        (ScheduleConfig, read("optim/muon.yaml")["schedule"]),
        (DataConfig, STDLIB),
        (SOURCES["stdlib"], STDLIB),
        (SOURCES["prose"], read("data/prose.yaml")),
        (SOURCES["mixture"], read("data/mixture.yaml")),
        (TokenizerConfig, STDLIB["tokenizer"]),
        (TrainerConfig, read("trainer/default.yaml")),
        (TopLevelConfig, TRAIN),
        (CausalityConfig, TRAIN["causality"]),
        *((find_target(entry["_target_"], name, ()), entry) for name, entry in OWN.items()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_defaults_in_code_are_those_of_the_yaml(kind, shipped):
    shipped = {name: value for name, value in shipped.items() if name != "source"}
    for name, default in defaults_of(kind).items():
        value = shipped.get(name)
        interpolated = isinstance(value, str) and value.startswith("${")
        if name in shipped and default is not UNSET and not interpolated:
            assert plain(default) == value, name
