"""The settings of a run, each declared once; what follows from a text; and how numbers and tables are printed."""

import copy
import shlex
from functools import reduce
from operator import getitem

import pytest

from tests.contract.harness import run
from tril.scripts import sample  # noqa: F401  which declares its settings
from tril.scripts.cli.app import DECLARED, compose, compose_unchecked
from tril.scripts.cli.config import RunConfig, flatten, known_settings
from tril.scripts.cli.errors import UserError, command

OF_A_TEXT = {key for key in known_settings() if key.startswith("data.")}


def checked(*settings: str) -> RunConfig:
    line = compose("train", settings)
    return RunConfig.of(line.settings, line.given)


def test_a_run_has_a_value_for_every_setting_of_its_groups_and_help_lists_them(tmp_path):
    values, settings = flatten(compose_unchecked("train", ["data=files"]).settings), DECLARED["train"].settings
    assert settings.keys() - values.keys() <= OF_A_TEXT
    text = run("train", "data=files", "--help=all", cwd=tmp_path).stdout
    assert {key for key in settings if f"  {key}=" not in text} <= OF_A_TEXT
    assert all(setting.help for setting in settings.values())
    short = run("train", "data=files", "--help", cwd=tmp_path).stdout
    assert "  model.n_heads=2 " in short and "model.norm_eps" not in short and "--help=all lists all" in short


def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_setting():
    settings = compose("train", []).settings
    for key in flatten(settings):
        changed = copy.deepcopy(settings)
        *groups, name = key.split(".")
        reduce(getitem, groups, changed)[name] = [{"a": 1}]  # which none is
        with pytest.raises((ValueError, UserError)) as refused:
            RunConfig.of(changed)
        assert key in str(refused.value)


def test_what_was_typed_without_an_effect_is_refused():
    for settings, words in (
        (["optim=adamw", "optim.momentum=0.5"], "optim.momentum=0.5 has no effect without optim.kind=muon"),
        (["data.tokenizer.revision=v1"], "data.tokenizer.revision=v1 has no effect without data.tokenizer.kind=hub"),
        (["learning_rate=1"], r"did you mean optim.lr_scale\? It multiplies all rates"),
    ):
        with pytest.raises(UserError, match=words):
            checked(*settings)


def test_settings_that_compute_the_same_are_equal():
    default = checked().canonical()
    assert checked("model.rope_base=20", "model.pos=rope").canonical() != default
    config = RunConfig.of(compose("train", ["optim=adamw", "optim.momentum=0.5"]).settings)
    assert config.canonical() == checked("optim=adamw").canonical()
    assert checked("logger=wandb", "checkpoint.every_n_steps=3").canonical() == default


def test_texts_are_as_typed_in_a_run_and_in_a_command():
    for text in ("def print(x", "a, b", "it's ${HOME} \\", " ", "{a: 1}", "5", "\\'", "a\tb\n", "", '="[$é\\\\.'):
        keys = ("ckpt", "prompt", "stop")
        settings = compose_unchecked("sample", [f"{key}={text}" for key in keys]).settings
        of_a_run = compose_unchecked("train", [f"callbacks.samples.prompt={text}"]).settings["callbacks"]
        assert [*map(settings.get, keys), of_a_run["samples"]["prompt"]] == [text] * 4


def test_a_printed_command_can_be_typed_in_a_shell_whatever_the_folder_is_called():
    for folder in ("outputs/2026-01-01/00-00-00", "/home/a b/it's", "$HOME/{a: 1}", "x;y"):
        words = shlex.split(command("train", f"resume={folder}"))
        assert words == ["python", "train.py", f"resume={folder}"]
        assert compose("train", words[2:]).own.resume == folder


def test_the_text_decides_the_vocabulary():
    assert checked().fitted(300).model.vocab_size == 300
    assert checked("model.vocab_size=320").fitted(300).model.vocab_size == 320
    with pytest.raises(UserError, match="model.vocab_size=256"):
        checked("model.vocab_size=256").fitted(300)
