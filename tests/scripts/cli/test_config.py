"""The settings of a command: each declared once, texts as they are given, and how a printed command looks."""

import copy
import shlex
import signal
import sys
from functools import reduce
from operator import getitem

import pytest

from tests.contract.harness import run
from tril.data.settings import flatten
from tril.model.formats import shell_command
from tril.model.training.hardware import Hardware
from tril.scripts import heads, play, sample  # noqa: F401  which declare their settings
from tril.scripts.cli import app, console
from tril.scripts.cli.app import COMMANDS, compose
from tril.scripts.cli.config import RunConfig, TrainCommand
from tril.scripts.cli.errors import UserError

TEXTS = ["def f(x): # [a, b]", "print(x", "a, b", "it's ${HOME} \\", " ", "{a: 1}", "5", "\\'", "a\tb", "", '="[$é\\.']
TEXTS += ["[a, b]", "null", "'x'", '"x"', "~x", "${oc.env:HOME}", "@property", "$HOME/{a: 1}", "x;y"]
PROMPTS = [("sample", "prompt"), ("sample", "stop"), ("heads", "prompt"), ("play", "prompt")]


def checked(*settings: str) -> RunConfig:
    composed = compose("train", settings)
    return RunConfig.of(composed.settings, composed.given)


@pytest.mark.parametrize("source", ["stdlib", "files", "shakespeare", "prose"])
def test_help_lists_every_setting_of_a_run_with_the_text_that_is_chosen(source, tmp_path):
    values, settings = flatten(compose("train", [f"data={source}"]).settings), COMMANDS["train"].settings(source)
    assert settings.keys() <= values.keys() and all(each.description for each in settings.values())
    text = run("train", f"data={source}", "--help=all", cwd=tmp_path).stdout
    assert all(f"  {key}=" in text for key in settings)
    assert settings["data.val_fraction"].description.split(";")[0].split(",")[0] in text
    short = run("train", f"data={source}", "--help", cwd=tmp_path).stdout
    assert "  model.n_heads=2 " in short and "model.norm_eps" not in short and "--help=all" in short


def test_a_value_of_a_wrong_type_is_refused_by_the_name_of_its_setting():
    settings = compose("train", []).settings
    for key in flatten(settings).keys() - {"resume", "init_from", "minutes"}:
        changed = copy.deepcopy(settings)
        *groups, name = key.split(".")
        reduce(getitem, groups, changed)[name] = [{"a": 1}]  # which none is
        with pytest.raises((ValueError, UserError)) as refused:
            RunConfig.of(changed)
        assert key in str(refused.value)


def test_settings_that_compute_the_same_are_equal():
    default = checked().canonical()
    assert checked("model.rope_base=20", "model.pos=rope").canonical() != default
    config = RunConfig.of(compose("train", ["optim=adamw", "optim.momentum=0.5"]).settings)
    assert config.canonical() == checked("optim=adamw").canonical()
    assert checked("logger=wandb", "checkpoint.every_n_steps=3", "debug=false").canonical() == default


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_needs_only_the_quotes_of_the_shell_also_in_a_printed_command(text):
    settings = compose("sample", [f"ckpt={text}", f"prompt={text}"]).settings
    assert (settings["ckpt"], settings["prompt"]) == (text, text)
    words = shlex.split(shell_command("train", f"callbacks.samples.prompt={text}"))[2:]
    of_a_run = compose("train", words).settings["callbacks"]["samples"]
    assert of_a_run["prompt"] == (None if text == "null" else text)


@pytest.mark.parametrize(("text", "value"), [(r"a\nb", "a\nb"), (r"\\n", r"\n"), (r"\t\d\\", "\t\\d\\"), ("\n", "\n")])
def test_escapes_mean_the_same_in_every_prompt(text, value):
    assert all(compose(name, [f"{key}={text}"]).settings[key] == value for name, key in PROMPTS)
    assert compose("train", [f"callbacks.samples.prompt={text}"]).settings["callbacks"]["samples"]["prompt"] == value
    assert compose("sample", [r"stop=[a,'\n']"]).settings["stop"] == ["a", "\n"]


@pytest.mark.parametrize(
    ("words", "source"), [("", "files"), ("data=shakespeare", "shakespeare"), ("experiment=shakespeare", "shakespeare")]
)
def test_data_path_alone_means_files(words, source, text):
    assert compose("train", [*words.split(), f"data.path={text}"]).settings["data"]["source"] == source


def test_a_whole_number_may_have_an_exponent():
    assert checked("trainer.max_steps=1e3").trainer.max_steps == 1000


def test_the_text_decides_the_vocabulary_and_the_machine_the_precision():
    hardware = Hardware("cpu", "32-true", False, "a CPU", None)
    config = checked().complete(hardware, 300)
    assert (config.model.vocab_size, config.trainer.precision) == (300, "32-true")
    assert config.decide_compilation().top.compile is False
    assert checked("model.vocab_size=320").complete(hardware, 300).model.vocab_size == 320
    with pytest.raises(ValueError, match="model.vocab_size=256"):
        checked("model.vocab_size=256").complete(hardware, 300)


def test_ctrl_c_raises_no_exception_while_the_settings_are_composed(monkeypatch):
    """OmegaConf turns a KeyboardInterrupt into an UnboundLocalError."""
    handlers, before = [], signal.getsignal(signal.SIGINT)
    keep = lambda *_: handlers.append(signal.getsignal(signal.SIGINT))  # noqa: E731
    monkeypatch.setattr(app, "compose", lambda *words: keep() or compose(*words))
    monkeypatch.setattr(sys, "argv", ["train.py", "seed=1"])
    try:
        console.end_at_interrupt()
        app.command("train", TrainCommand)(keep)()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [console._end_program, signal.default_int_handler]
