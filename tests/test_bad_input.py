"""Wrong input for every command: one line on stderr, exit status 2, nothing computed and nothing left behind.

`tests/contract/bad_input.txt` has what users do most; here is each other kind of mistake once.
"""

import importlib

import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused, tiny_gpt
from tril.data.tokenizer import TokenizerConfig, build
from tril.model.checkpoint import save
from tril.model.generation.language_model import LanguageModel
from tril.scripts.cli.errors import UserError, fail

EXPENSIVE = {  # what each command does with settings that it accepts
    "train": "tril.data.datamodule.TextDataModule.prepare_data",
    "certify": "tril.model.causality.certificate.certify_model",
    "referee": "tril.scripts.experiments.referee.judge",
}
ROWS = {  # command -> arguments, and what the line contains; FILES is the folder of the fixture
    "train": [
        ("optim=null", "Config group override must be a string or a list. Got NoneType"),
        ("+model=small", "Multiple values for model. To override a value use 'override model: small'"),
        ("sweep.skip_invalid=true", "sweep.skip_invalid=true has no effect on a single run; leave it out, or add -m"),
        ("+ablation=heads", "the ablation is a grid over model.n_heads; run it with python train.py -m, or choose a"),
        ("model.dim=${nothing}", "Interpolation key 'nothing' not found: full_key: model.dim"),
        ("optim.schedule.warmup_steps=x", "optim.schedule.warmup_steps='x' must be a valid integer"),
        ("callbacks.samples.max_new_tokens=x", "callbacks.samples.max_new_tokens='x' must be a valid integer"),
        ("optim.betas=[0.9,1]", "optim.betas.1=1 must be less than 1"),
        ("model.causal=false", "model.causal=false lets every position attend to later ones, so its losses would be"),
        ("model.backend=flex trainer.accelerator=cpu", "model.backend=flex needs trainer.accelerator=cuda to train,"),
        ("trainer=ddp trainer.num_nodes=2", "trainer.num_nodes=2 needs processes that torchrun or srun starts on"),
        ("trainer=fsdp compile=true", "compile=true does not go with trainer=fsdp; set compile=false"),
        ("checkpoint=null", "checkpoint=null must be a group of settings; change one, such as checkpoint.KEY=VALUE"),
        ("callbacks.progress._target_=os.system", "there is no setting callbacks.progress._target_; did you mean"),
        ("+callbacks.mine={}", "there is no setting callbacks.mine; choose one of callbacks.causality,"),
        ("+callbacks.mine._target_=lightning.pytorch.callbacks.Nothing", "callbacks.mine._target_=l"),
        ("+callbacks.mine._target_=lightning.pytorch.loggers.logger.DummyLogger", "is no callback of Lightning; corr"),
        ("+callbacks.mine._target_=tril.model.training.callbacks.output.Progress", "is not a callback or logger of"),
        ("logger=[wandb,tensorbord]", "there is no logger=tensorbord; did you mean tensorboard?"),
        ("data.source=nowhere", "data.source=nowhere must be one of stdlib, prose, shakespeare, files, hub, mixture"),
        (
            "data.token_budget=256",
            "data.token_budget=256 must be more than model.context_length=256, the tokens of one",
        ),
        ("data.cache_dir=FILES/text.txt", "data.cache_dir=FILES/text.txt is a file; give a folder"),
        ("data.tokenizer.kind=file", "data.tokenizer.path is missing; kind=file needs a tokenizer.json"),
    ],
    "evaluate": [
        (
            "ckpt=FILES/tiny.ckpt",
            "FILES/config.yaml does not exist, so the data of FILES/tiny.ckpt are unknown; name a",
        ),
        ("ckpt=FILES/tiny.ckpt pairs=FILES/text.txt data=prose", "data=prose has no effect without pairs=null"),
        ("ckpt=FILES/tiny.ckpt data=files data.path=FILES/text.txt out=FILES/text.txt", "cannot write to"),
    ],
    "certify": [
        ("hf=FILES/tokenizer.json", "hf=FILES/tokenizer.json cannot be loaded; name a folder written by"),
        ("call=os:sep vocab_size=3 context_length=4", "call=os:sep is not callable on ids; name a function"),
        ("call=os:getcwd vocab_size=0 context_length=4", "vocab_size=0 must be an integer of at least 3"),
        ("call=not_there:f vocab_size=3 context_length=4", "call=not_there:f cannot be imported: No module named"),
        ("context_length=3", "vocab_size, context_length, receptive_field go with call=...; of a fresh model set"),
        ("ckpt=FILES/tiny.ckpt model=nano", "ckpt=FILES/tiny.ckpt and model=nano name several models; keep one"),
    ],
    "heads": [("dir=FILES/text.txt", "FILES/text.txt is not a folder; name that of a sweep, such as multirun/DATE/")],
    "report": [
        ("margin=1", "dir is missing; name the folder of a sweep, dir=multirun/DATE/TIME, or dir=latest"),
        ("dir=FILES/folder margin=nan", "margin=nan must be a finite number"),
        ("dir=FILES/folder out=a publish=b", "out=a excludes publish=b; use one of them"),
    ],
    "referee": [
        ("margin=1", 'candidate is missing; name what it changes, as in candidate="model.n_heads=8"'),
        ("candidate=", "baseline and candidate have the same settings; set what the candidate changes"),
        ("candidate=causality.allow_leak=true", "causality.allow_leak=true allows false losses; the referee"),
        ("candidate=callbacks.causality=null", "callbacks.causality=null leaves out the certificate; the referee"),
        ("candidate=seed=1", "candidate: seed=1 cannot be set for an arm; set the first seed with seed=N, outside of"),
        ("candidate=-m", "candidate: cannot read '-m'; settings are written key=value"),
        ("candidate='model.dim=", 'candidate: cannot read "\'model.dim=" (No closing quotation); close the quotes'),
        ("candidate= common=trainer.max_steps=x", "baseline: trainer.max_steps='x' must be a valid integer"),
    ],
    "sample": [
        ("ckpt=FILES/other.ckpt", "FILES/other.ckpt has no state_dict and tril entries; use a .ckpt file that train"),
        ("ckpt=FILES/tiny.ckpt stop=''", "stop.0= must have at least 1 character"),
        ("ckpt=FILES/tiny.ckpt prompt=[a,'\udcff']", "surrogates not allowed"),  # a byte that is not UTF-8
        ("ckpt=FILES/tiny.ckpt -m n=2", "-m starts a grid of training runs, which sample cannot; leave"),
    ],
    "export": [("ckpt=FILES/tiny.ckpt out=FILES/text.txt", "out=FILES/text.txt exists; name a new one")],
    "play": [("ckpt=FILES/tiny.ckpt port=0 other=nowhere", "nowhere does not exist; name a checkpoint file")],
}


def main_of(command):
    return importlib.import_module("tril.train" if command == "train" else f"tril.scripts.{command}").main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A checkpoint without a run, and what is not one."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = build(TokenizerConfig(kind="byte"))
    save(folder / "tiny.ckpt", LanguageModel(tiny_gpt(vocab_size=320), tokenizer))
    torch.save({"state_dict": {}}, folder / "other.ckpt")
    (folder / "folder").mkdir()
    (folder / "text.txt").write_text("some text\n" * 200)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.mark.parametrize("command", ROWS)
def test_it_is_refused(command, files, tmp_path, monkeypatch):
    def expensive(*_, **__):
        raise AssertionError("the settings were accepted")

    if command in EXPENSIVE:
        monkeypatch.setattr(EXPENSIVE[command], expensive)
    for words, message in ROWS[command]:
        words = [word.replace("FILES", str(files)) for word in words.split(" ")]
        done = call(main_of(command), *words, cwd=tmp_path, TRIL_CACHE=str(files / "cache"))
        assert_refused(done, message.replace("FILES", str(files)))
        assert len(done.stderr.splitlines()) == 1, done.stderr  # nor any of the other line separators
        assert list(tmp_path.iterdir()) == [], words


def test_an_error_is_one_line_whatever_it_contains(capsys):
    error = UserError("a\nb\u2028c\x1b[31m")
    error.add_note("a note")
    with pytest.raises(SystemExit):
        fail(error)
    assert capsys.readouterr().err == "error: a b c\\x1b[31m\na note\n"
