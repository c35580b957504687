"""What `data:` accepts, how it refuses everything else, and how pydantic's refusals become one line."""

from dataclasses import fields
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from tril.data.config import SOURCES, DataConfig, parse
from tril.data.settings import explain, strict_settings
from tril.data.sources.hub import Hub
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.cli.command_line import Typed
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import data_presets
from tril.scripts.cli.errors import message_of

YAMLS = data_presets()
HUBS = {
    "tinystories": Hub(repo="roneneldan/TinyStories"),
    "wikitext103": Hub(repo="Salesforce/wikitext", config="wikitext-103-raw-v1", row_ends_document=False),
    "fineweb_edu": Hub(
        repo="HuggingFaceFW/fineweb-edu", config="sample-10BT", val_split=None, val_fraction=0.01, streaming=True
    ),
}


def changed(name="stdlib", tokenizer=None, **values):
    mapping = YAMLS[name] | values
    return mapping | {"tokenizer": mapping["tokenizer"] | (tokenizer or {})}


def test_shipped_yamls_have_every_key_and_give_these_sources():
    """Without a key, Hydra would refuse an override of it."""
    for name, values in YAMLS.items():
        assert compose("train", Typed.of([f"data={name}"])).settings["data"] == values
        settings = fields(DataConfig) + fields(SOURCES[values["source"]])
        assert set(values) == {field.name for field in settings}
        assert set(values["tokenizer"]) == {field.name for field in fields(TokenizerConfig)}
    parsed = {name: parse(YAMLS[name]) for name in YAMLS.keys() - {"files", "mixture"}}
    assert {name: parsed[name].source for name in HUBS} == HUBS
    assert parsed["stdlib"].tokenizer == TokenizerConfig(kind="bpe", vocab_size=None)
    assert (parsed["stdlib"].batch_size, parsed["shakespeare"].batch_size) == (8, 12)
    assert parsed["fineweb_edu"].token_budget == 2_500_000_000
    assert parsed["fineweb_edu"].tokenizer.path == "openai-community/gpt2"
    line = compose("train", Typed.of(["data=hub", "data.repo=owner/name"]))  # a source without a yaml file
    assert (line.settings["data"]["source"], line.settings["data"]["repo"]) == ("hub", "owner/name")


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (changed(path="x"), "there is no setting data.path"),  # of other sources only
        (changed(tokenizer={"vocabsize": 5}), "data.tokenizer.vocabsize; did you mean data.tokenizer.vocab_size?"),
        (changed() | {"tokenizer": "byte"}, "data.tokenizer=byte must be a group of settings; change one"),
        (changed(batch_size=0, token_budget=-1), "data.batch_size=0 must be greater than or equal to 1; data.token_b"),
        ({"source": "hub", "batch_size": 3, "tokenizer": {}}, "data.repo is missing"),
    ],
)
def test_mistakes_are_refused_in_one_line(mapping, message):
    with pytest.raises(ValueError) as error:
        parse(mapping)
    line = message_of(error.value)
    assert message in line and "\n" not in line


@dataclass(frozen=True, config=strict_settings("optim.schedule"))
class Schedule:
    kind: Literal["cosine", "linear"]
    steps: Annotated[int, Field(ge=1)] = 1
    names: list[str] = Field(default_factory=list)

    @model_validator(mode="after")
    def check(self):
        if self.steps == 13:
            raise ValueError("optim.schedule.steps=13 must not be 13; use 12 or 14")
        return self


def test_a_refused_setting_is_named_with_its_value_and_limit():
    for values, message in (
        ({"steps": "8"}, "optim.schedule.steps='8' must be a valid integer"),  # the quotes tell it from 8
        ({"steps": True}, "optim.schedule.steps=true must be a valid integer"),  # as in yaml
        ({"names": ["x", 3]}, "optim.schedule.names.1=3 must be a valid string"),
        ({"steps": 13}, "optim.schedule.steps=13 must not be 13; use 12 or 14"),  # without pydantic's prefix
    ):
        with pytest.raises(ValidationError) as error:
            Schedule(**{"kind": "cosine", **values})
        assert explain(error.value).startswith(message) and "\n" not in explain(error.value)
