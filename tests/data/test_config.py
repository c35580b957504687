"""What `data:` accepts, and how it refuses everything else."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tril.data.config import SOURCES, DataConfig, Mixture, expand, parse
from tril.data.sources.files import Files
from tril.data.sources.hub import Hub
from tril.data.sources.prose import Prose
from tril.data.sources.single_text import SingleText
from tril.data.sources.stdlib import StandardLibrary
from tril.data.tokenizer import TokenizerConfig
from tril.scripts.cli.command_line import Typed, compose
from tril.scripts.cli.config import data_presets
from tril.scripts.cli.errors import message_of

ROOT = Path(__file__).parents[2]
YAMLS = data_presets()


def changed(name="stdlib", tokenizer=None, **values):
    mapping = YAMLS[name] | values
    return mapping | {"tokenizer": mapping["tokenizer"] | (tokenizer or {})}


def test_shipped_yamls_give_these_sources(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    needed = {"files": {"path": str(tmp_path)}, "mixture": {"sources": {"stdlib": 0.7, str(tmp_path): 0.3}}}
    parsed = {name: parse(changed(name, **needed.get(name, {}))) for name in YAMLS}
    assert {name: settings.source for name, settings in parsed.items()} == {
        "stdlib": StandardLibrary(),
        "prose": Prose(),
        "shakespeare": SingleText(),
        "files": Files(path=str(tmp_path)),
        "mixture": Mixture(sources=expand(needed["mixture"]["sources"], {})),
        "tinystories": Hub(repo="roneneldan/TinyStories"),
        "wikitext103": Hub(repo="Salesforce/wikitext", config="wikitext-103-raw-v1", row_ends_document=False),
        "fineweb_edu": Hub(
            repo="HuggingFaceFW/fineweb-edu", config="sample-10BT", val_split=None, val_fraction=0.01, streaming=True
        ),
    }  # fmt: skip
    assert parsed["stdlib"].tokenizer == TokenizerConfig(kind="bpe", vocab_size=None)
    assert (parsed["stdlib"].batch_size, parsed["shakespeare"].batch_size) == (8, 12)
    assert parsed["fineweb_edu"].token_budget == 2_500_000_000
    assert parsed["fineweb_edu"].tokenizer.path == "openai-community/gpt2"


@pytest.mark.parametrize("name", YAMLS)
def test_shipped_yamls_with_their_defaults_contain_every_key(name):
    """Otherwise Hydra would refuse an override of that key."""
    assert compose("train", Typed.of([f"data={name}"])).settings["data"] == YAMLS[name]
    settings = fields(DataConfig) + fields(SOURCES[YAMLS[name]["source"]])
    assert set(YAMLS[name]) == {field.name for field in settings}
    assert set(YAMLS[name]["tokenizer"]) == {field.name for field in fields(TokenizerConfig)}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (changed(source="web"), "data.source=web must be one of stdlib, prose, shakespeare, files, hub"),
        (changed(batchsize=3), "there is no setting data.batchsize; did you mean data.batch_size?"),
        (changed(zzzz=3), "there is no setting data.zzzz; choose one of data.batch_size, data.cache_dir"),
        (changed(path="x"), "there is no setting data.path"),  # of other sources only
        (changed(tokenizer={"vocabsize": 5}), "data.tokenizer.vocabsize; did you mean data.tokenizer.vocab_size?"),
        (
            changed(tokenizer={"kind": "words"}),
            "data.tokenizer.kind=words must be 'bpe', 'char', 'byte', 'file' or 'hub'",
        ),
        (changed() | {"tokenizer": "byte"}, "data.tokenizer=byte must be a group of settings; change one"),
        (
            changed(batch_size=0, token_budget=-1),
            "data.batch_size=0 must be greater than or equal to 1; data.token_budget=-1",
        ),
        (changed(batch_size=True), "data.batch_size=true must be a valid integer"),
        (changed(val_fraction=1.5), "data.val_fraction=1.5 must be less than 1"),
        (changed("files"), "data.path is missing; give a file, a folder or a glob"),
        ({"source": "hub", "batch_size": 3, "tokenizer": {}}, "data.repo is missing"),
    ],
)
def test_mistakes_are_refused_in_one_line(mapping, message):
    with pytest.raises(ValueError) as error:
        parse(mapping)
    line = message_of(error.value)
    assert message in line and "\n" not in line


def test_import_is_light():
    heavy = ("torch", "lightning", "datasets", "pyarrow", "huggingface_hub")
    code = f"import sys, tril.data.config; print([name for name in {heavy} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert answer.stdout.strip() == "[]", answer.stderr


def test_a_source_without_a_yaml_file_is_chosen_by_its_name():
    line = compose("train", Typed.of(["data=hub", "data.repo=owner/name"]))
    assert (line.settings["data"]["source"], line.settings["data"]["repo"]) == ("hub", "owner/name")
