"""What `data:` accepts, and the lengths of windows."""

from dataclasses import fields

import pytest

from tril.data.config import DataConfig, parse
from tril.data.sources import SOURCES
from tril.data.sources.hub import Hub
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.cli.app import compose
from tril.scripts.cli.config import CONFIGS

NAMES = sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml"))
YAMLS = {name: compose("train", [f"data={name}"]).settings["data"] for name in NAMES}
HUBS = {
    "tinystories": Hub(repo="roneneldan/TinyStories"),
    "wikitext103": Hub(repo="Salesforce/wikitext", config="wikitext-103-raw-v1", row_ends_document=False),
    "fineweb_edu": Hub(
        repo="HuggingFaceFW/fineweb-edu", config="sample-10BT", val_split=None, val_fraction=0.01, streaming=True
    ),
}


def test_shipped_yamls_have_every_key_and_give_these_sources():
    """Without a key, Hydra would refuse an override of it."""
    for values in YAMLS.values():
        settings = fields(DataConfig) + fields(SOURCES[values["source"]])
        assert set(values) == {field.name for field in settings}
        assert set(values["tokenizer"]) == {field.name for field in fields(TokenizerConfig)}
    parsed = {name: parse(YAMLS[name]) for name in YAMLS.keys() - {"files"}}
    assert {name: parsed[name].source for name in HUBS} == HUBS
    assert parsed["stdlib"].tokenizer == TokenizerConfig(kind="bpe", vocab_size=None)
    assert (parsed["stdlib"].batch_size, parsed["shakespeare"].batch_size) == (4, 4)
    assert parsed["fineweb_edu"].token_budget == 2_500_000_000
    assert parsed["fineweb_edu"].tokenizer.path == "openai-community/gpt2"
    line = compose("train", ["data=hub", "data.repo=owner/name"])  # a source without a yaml file
    assert (line.settings["data"]["source"], line.settings["data"]["repo"]) == ("hub", "owner/name")


@pytest.mark.parametrize(
    ("context_length", "doublings", "lengths"),
    [
        (512, (0.3, 0.7), {128: 0.3, 256: 0.7, 512: 1}),
        (512, (), {512: 1}),
        (1024, (0.3, 0.7), {256: 0.3, 512: 0.7, 1024: 1}),
        (256, (0.3, 0.7), {128: 0.7, 256: 1}),
        (255, (0.3, 0.7), {255: 1}),  # half of it is not whole
        (254, (0.3, 0.7), {254: 1}),  # half of it is too short
        (300, (0.3, 0.7), {150: 0.7, 300: 1}),
    ],
)
def test_the_length_of_windows_doubles_where_halves_are_whole_and_long_enough(context_length, doublings, lengths):
    config = parse({"source": "stdlib", "double_length_at": doublings})
    found = config.window_lengths(context_length)
    assert found == lengths and [*found] == sorted(found)
