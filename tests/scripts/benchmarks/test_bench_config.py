"""The settings of the benchmark: what is refused, and which keys train.py receives."""

import pytest
from omegaconf import OmegaConf

from tests.scripts.benchmarks.conftest import composed
from tril.scripts import bench
from tril.scripts.benchmarks.bench_config import KEYS, PARTS, TEXTS, parse
from tril.scripts.common.cli import CONFIGS, UserError, user_errors


def changed(*overrides):
    """As `composed`, without Hydra's grammar, which takes longer."""
    return OmegaConf.merge(composed(), OmegaConf.from_dotlist(list(overrides)))


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


def test_groups_and_shared_keys_equal_those_of_train_py():
    """What is timed is what would be trained."""
    ours, theirs = OmegaConf.load(CONFIGS / "bench.yaml"), OmegaConf.load(CONFIGS / "train.yaml")
    groups, expected = (
        [str(group) for group in cfg.defaults if "override" not in str(group) and group != "script_defaults"]
        for cfg in (ours, theirs)
    )
    assert groups == expected
    shared = {key for key in theirs if key in ours} - {"defaults", "hydra", "output_dir"}
    assert shared == {"seed", "compile", "causality", "checkpoint", "allow_targets"}
    assert all(ours[key] == theirs[key] for key in shared - {"checkpoint"})  # no checkpoint while steps are timed
    assert set(ours) - set(theirs) == set(KEYS) and set(TEXTS) < set(KEYS)


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
    assert bench.parse_run(composed("trainer.accelerator=cpu", *overrides)).model.vocab_size == size


def test_a_tokenizer_of_the_hub_is_not_loaded_for_its_size():
    overrides = ["trainer.accelerator=cpu", "data.tokenizer.kind=hub", "data.tokenizer.path=somebody/model"]
    with pytest.raises(ValueError, match="set it, as in model.vocab_size="):
        bench.parse_run(composed(*overrides))


def test_train_py_receives_only_its_own_keys():
    accepted = ["model.dim=8", "+trainer.x=1", "~callbacks.samples", "experiment=e", "seed=1"]
    own = ["what=train", "vs='python x'", "vs_dir=a", "vs_pattern=b", "vs_tokens=2", "vs_sample=a", "ckpt=a", "out=b"]
    own += ["repeats=1", "warmup=1", "steps=1", "output_dir=x"]
    assert [override for override in own + accepted if bench.is_for_training(override)] == accepted
