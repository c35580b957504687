"""The settings of the benchmark: what is refused, and which keys train.py receives."""

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from tests.scripts.benchmarks.conftest import composed, run_config
from tril.model.training.settings import CheckpointConfig
from tril.scripts.benchmarks.bench_config import KEYS, PARTS, TEXTS, parse
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.errors import UserError, user_errors
from tril.scripts.cli.typed import Typed


def changed(*overrides):
    """As `composed`, without Hydra's grammar, which takes longer."""
    return composed() | OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))


@pytest.mark.parametrize(
    "override, message",
    [
        ("what=trian", "what=trian is not a part of the benchmark; did you mean train?"),
        (
            "what=[train,3]",
            "what=3 is not a part of the benchmark; choose one of attention, cost, data, decode, outside, start, train",
        ),
        ("what=3", "what=3 is not a part"),
        ("what=[[train]]", "is not a part"),
        ("what=null", "what=None is not a part"),
        ("what=[]", "must name each part once, and at least one"),
        ("what=[train,train]", "must name each part once"),
        ("repeats=0", "repeats=0 must be greater than or equal to 1"),
        ("steps=0", "steps=0 must be greater than or equal to 1"),
        ("steps=2.5", "steps=2.5 must be a valid integer"),
        ("warmup=-1", "warmup=-1 must be greater than or equal to 0"),
        ("repeats=true", "repeats=true must be a valid integer"),
        ("vs_tokens=0", "vs_tokens=0 must be greater than or equal to 1"),
        ("vs_tokens=true", "vs_tokens=true must be a valid integer"),
        ("ckpt=none.ckpt", "none.ckpt does not exist; name a checkpoint file"),
    ],
)
def test_invalid_values(override, message):
    with pytest.raises(UserError) as caught, user_errors():
        parse(changed(override))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["vs='python x.py'"], "vs is timed by what=train, but what=decode,data; add train"),
        (["vs_sample='python sample.py --n=100'"], "lacks {n}"),
        (["vs_sample='no-such-program {n}'"], "there is no program no-such-program"),
        (['vs_sample="python \'x {n}"'], "is not a command (No closing quotation)"),
        (["vs_sample='  '"], "is not a command"),
        (["vs_sample='python {n}'", "vs_dir=/no/such"], "vs_dir=/no/such is not a folder"),
        (["vs_pattern='time (.*'"], "vs_pattern=time (.* must be a valid regular expression"),
        (["vs_pattern='time .*'"], "has 0 groups; it needs one"),
    ],
)
def test_a_command_that_cannot_be_started_or_read(overrides, message):
    with pytest.raises(UserError) as caught, user_errors():
        parse(changed("what=[decode,data]", *overrides))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_all_parts_or_one():
    assert parse(composed()).what == list(PARTS)
    assert parse(composed("what=outside")).what == ["outside"]
    assert parse(composed("what=[decode,train]")).what == ["decode", "train"]


def test_other_settings_are_those_of_train_py():
    """What is timed is what would be trained, without checkpoints while steps are timed."""
    settings = {key: value for key, value in composed().items() if key not in KEYS}
    theirs = RunConfig.of(compose("train", Typed()).settings)
    checkpoint = CheckpointConfig(every_minutes=None, every_n_steps=None)
    assert RunConfig.of(settings) == replace(theirs, checkpoint=checkpoint)
    assert set(composed()) - set(settings) == set(KEYS) > set(TEXTS)


@pytest.mark.parametrize(
    "overrides, size",
    [
        (["model.vocab_size=123"], 123),
        (["data.tokenizer.vocab_size=300"], 300),
        (["data.tokenizer.kind=byte"], 257),
        (["data.tokenizer.kind=char"], 67),
    ],
)
def test_the_vocabulary_size_follows_the_tokenizer(overrides, size):
    assert run_config(composed(*overrides)).model.vocab_size == size


def test_a_tokenizer_of_the_hub_is_not_loaded_for_its_size():
    with pytest.raises(UserError, match="set it, as in model.vocab_size="):
        run_config(composed("data.tokenizer.kind=hub", "data.tokenizer.path=somebody/model"))
