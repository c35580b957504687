"""The settings of a run: each is declared once, and everything else follows from its field."""

import pytest

from tril.data.config import SOURCES, DataConfig
from tril.data.settings import declared
from tril.model.training.settings import TopLevelConfig
from tril.scripts.cli.compose import compose
from tril.scripts.cli.config import GROUPS, RunConfig
from tril.scripts.cli.errors import UserError
from tril.scripts.cli.help import help_lines
from tril.scripts.cli.start import replace_value
from tril.scripts.cli.typed import FREE_TEXT, Typed

GROUPS_OF_A_RUN = [("", TopLevelConfig), *GROUPS.items(), ("data", DataConfig), ("data", SOURCES["stdlib"])]
SETTINGS = {each.key: each for prefix, group in GROUPS_OF_A_RUN for each in declared(group, prefix)}
OPTIONAL = {key.rpartition(".")[0] for key in SETTINGS if key.startswith(("callbacks.early_stop", "logger"))}


def checked(*settings: str) -> RunConfig:
    typed = Typed.of(settings, FREE_TEXT)
    return RunConfig.of(compose("train", typed).settings, typed)


def test_the_defaults_of_a_run_are_those_of_the_fields():
    values = checked().to_dict()
    for key, setting in SETTINGS.items():
        if setting.key.partition(".")[0] == "sweep" or any(key.startswith(f"{group}.") for group in OPTIONAL):
            continue
        value = values
        for name in key.split("."):
            value = value[name] if name != "source" else "stdlib"
        assert key == "data.source" or value == setting.default, key


@pytest.mark.parametrize("key", [key for key in SETTINGS if key != "data.source"])
def test_a_setting_of_the_wrong_type_is_named(key):
    with pytest.raises(UserError, match=key.replace(".", r"\.")) as error:
        checked(f"{key}=[[1]]")
    assert "\n" not in str(error.value)


def test_every_setting_has_a_line_of_help():
    composed = compose("train", Typed())
    text = "\n".join(help_lines("", "train", composed.settings, {}))
    missing = [key for key in SETTINGS if f"  {key}=" not in text]
    assert {key.rpartition(".")[0] for key in missing} <= OPTIONAL and all(SETTINGS[key].help for key in SETTINGS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optim=adamw", "optim.momentum=0.5"], "optim.momentum=0.5 has no effect without optim.kind=muon"),
        (["model.pos=none", "model.rope_base=20"], "model.rope_base=20 has no effect without model.pos=rope"),
        (["optim.base_width=64"], "optim.base_width=64 has no effect without optim.scale_with_width"),
        (["data.tokenizer.revision=v1"], "data.tokenizer.revision=v1 has no effect without data.tokenizer.kind=hub"),
        (["~optim.lr"], "optim.lr is required"),
        (["limit_val_batches=3"], "did you mean trainer.limit_val_batches?"),
        (["learning_rate=1"], "did you mean optim.lr?"),
        (["output_dir=x"], "did you mean hydra.run.dir?"),
        (["++foo.bar=1"], "there is no setting foo.bar"),
    ],
)
def test_what_was_typed_without_an_effect_is_refused(settings, words):
    with pytest.raises(UserError, match=words.replace("?", r"\?")):
        checked(*settings)


def test_settings_that_compute_the_same_are_equal():
    assert checked("model.rope_base=20", "model.pos=rope").canonical() != checked().canonical()
    typed = Typed.of(["optim=adamw", "optim.momentum=0.5"])
    config = RunConfig.of(compose("train", typed).settings, typed, in_sweep=True)
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
    assert [each.text for each in typed] == ["++trainer.max_steps=3", "~callbacks.samples", "model=small"]


def test_a_resumed_run_takes_what_was_typed_and_keeps_the_rest():
    saved = {"trainer": {"max_steps": 9, "devices": 1}, "callbacks": {"samples": {}, "heads": {}}}
    composed = {"trainer": {"max_steps": 3, "devices": 2}, "callbacks": {"heads": {"windows": 2}}}
    for key in ("trainer.max_steps", "callbacks.samples", "logger.wandb.project"):
        replace_value(saved, key.split("."), composed | {"logger": {"wandb": {"project": "x"}}})
    expected = {"trainer": {"max_steps": 3, "devices": 1}, "callbacks": {"heads": {}}}
    assert saved == expected | {"logger": {"wandb": {"project": "x"}}}


def test_the_text_decides_the_vocabulary():
    class Text:
        meta = {"vocab_size": 300}

    assert checked().fitted(Text).model.vocab_size == 300
    assert checked("model.vocab_size=320").fitted(Text).model.vocab_size == 320
    with pytest.raises(UserError, match="model.vocab_size=256"):
        checked("model.vocab_size=256").fitted(Text)
