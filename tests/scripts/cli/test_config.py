"""The settings of a run: each is declared once, and everything else follows from its field."""

import pytest

from tests.calls import call
from tril import train
from tril.data.settings import plain
from tril.scripts.cli.command_line import PROGRAMS, Typed, compose
from tril.scripts.cli.config import RunConfig, flatten, known_settings
from tril.scripts.cli.errors import UserError

OF_A_TEXT = {key for key in known_settings() if key.startswith("data.")}


def checked(*settings: str) -> RunConfig:
    line = compose("train", Typed.of(settings))
    return RunConfig.of(line.settings, line.typed)


def test_the_defaults_of_a_run_are_those_of_the_fields():
    values = flatten(checked().to_dict())
    for key, setting in PROGRAMS["train"].settings.items():
        if key in values and key not in OF_A_TEXT:
            assert values[key] == plain(setting.default), key


@pytest.mark.parametrize("key", sorted(known_settings().keys() - OF_A_TEXT))
def test_a_setting_of_the_wrong_type_is_named(key):
    with pytest.raises(UserError, match=key.replace(".", r"\.")) as error:
        checked(f"{key}=[[1]]")
    assert "\n" not in str(error.value)


def test_every_setting_has_a_line_of_help(tmp_path):
    on = ["logger=[wandb,tensorboard]", "data=files"]
    text = call(train.main, *on, "--help=all", cwd=tmp_path).stdout
    settings = PROGRAMS["train"].settings
    missing = {key for key in settings if f"  {key}=" not in text}
    assert missing <= OF_A_TEXT, missing - OF_A_TEXT
    assert all(setting.help for setting in settings.values())
    short = call(train.main, *on, "--help", cwd=tmp_path).stdout
    assert "  model.n_heads=4 " in short and "model.norm_eps" not in short and "--help=all lists all" in short


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optim=adamw", "optim.momentum=0.5"], "optim.momentum=0.5 has no effect without optim.kind=muon"),
        (["data.tokenizer.revision=v1"], "data.tokenizer.revision=v1 has no effect without data.tokenizer.kind=hub"),
        (["~optim.lr"], "optim.lr is required"),
        (["limit_val_batches=3"], "did you mean trainer.limit_val_batches?"),
        (["learning_rate=1"], "did you mean optim.lr_scale? It multiplies all rates"),
        (["++foo.bar=1"], "there is no setting foo.bar"),
    ],
)
def test_what_was_typed_without_an_effect_is_refused(settings, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        checked(*settings)


def test_settings_that_compute_the_same_are_equal():
    assert checked("model.rope_base=20", "model.pos=rope").canonical() != checked().canonical()
    config = RunConfig.of(compose("train", Typed.of(["optim=adamw", "optim.momentum=0.5"])).settings)
    assert config.canonical() == checked("optim=adamw").canonical()
    assert checked("logger=wandb", "checkpoint.every_n_steps=3").canonical() == checked().canonical()


def test_callbacks_are_on_off_and_added():
    config = checked("~callbacks.samples", "callbacks.early_stop.patience=2", "+callbacks.mine._target_=a.B")
    assert config.callbacks.samples is None and config.callbacks.early_stop.patience == 2
    assert config.targets == {"callbacks.mine": {"_target_": "a.B"}}
    assert checked("callbacks.heads=null").callbacks.heads is None
    assert checked("logger=[wandb,tensorboard]", "logger.wandb.project=x").logger.wandb.project == "x"


def test_what_was_typed_is_text_where_a_setting_is_text():
    for text in ("def print(x", "a, b", "it's ${HOME} \\", " ", "{a: 1}"):
        assert checked(f"callbacks.samples.prompt={text}").callbacks.samples.prompt == text
    typed = Typed.of(["+trainer.max_steps=3", "~callbacks.samples", "model=small"])
    assert PROGRAMS["train"].overrides(typed) == ["++trainer.max_steps=3", "~callbacks.samples", "model=small"]


def test_the_text_decides_the_vocabulary():
    assert checked().fitted(300).model.vocab_size == 300
    assert checked("model.vocab_size=320").fitted(300).model.vocab_size == 320
    with pytest.raises(UserError, match="model.vocab_size=256"):
        checked("model.vocab_size=256").fitted(300)
