"""From Python: `train` and `load` of docs/training.md, the notebook, and the installed wheel."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from tests.contract.conftest import install_wheel
from tests.contract.harness import BARE, ROOT, merged, metrics, run, summary
from tril.model import load
from tril.train import train


def process_state() -> tuple:
    signals = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    return logging.root.handlers[:], signals, list(sys.argv), os.getcwd(), GlobalHydra.instance().hydra


def test_train_is_the_command_and_keeps_signal_handlers_and_the_hydra_of_its_caller(texts, tmp_path, monkeypatch):
    settings = (*BARE, f"data.path={texts}")
    done = run("train", *settings, "hydra.run.dir=typed", cwd=tmp_path)
    assert done.returncode == 0 and f"sample.py ckpt={tmp_path / 'typed'} prompt" in done.stdout, done
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    (older := tmp_path / "outputs" / "older" / "checkpoints").mkdir(parents=True)
    (older / "best.ckpt").touch()
    monkeypatch.setattr(GlobalHydra.instance(), "hydra", "of a program that calls train()")
    before = process_state()
    called = train(*settings)
    assert process_state() == before
    assert called.folder.parents[2] == tmp_path and called.summary == summary(called.folder)
    losses = {row["step"]: row["val/loss"] for row in called.metrics if "val/loss" in row}
    assert losses == metrics(tmp_path / "typed", "val/loss")
    (called.folder / "config.yaml").replace(called.folder / "checkpoints" / "last.ckpt")  # the best checkpoint is meant
    models = [load("typed"), load(called.folder), load("latest", device="cpu"), called.load()]
    assert models[0].config.n_heads == 2 and models[0].tokenizer.get_vocab_size() == 300
    ids = torch.arange(32)[None]
    assert all(torch.equal(lm.model(ids), models[0].model(ids)) for lm in models)
    (text,) = {lm.generate("The dog", max_new_tokens=20, seed=1) for lm in models}
    assert "".join(models[0].stream("The dog", max_new_tokens=20, seed=1)) == text


def test_a_wrong_setting_is_a_value_error_with_the_line_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [[*BARE, setting] for setting in ("model.n_heads=3", "modle=nano", "data.path=nowhere.txt")]
    for row in rows:
        done = run("train", *row, cwd=tmp_path)
        with pytest.raises(ValueError, match=row[-1].split("=")[0]) as raised:
            train(*row)
        assert done.stderr == f"error: {raised.value}\n"
    assert not list(tmp_path.iterdir())


def test_an_import_is_quick_and_an_unknown_name_is_named(tmp_path):
    code = "import sys; from tril.train import train; assert 'torch' not in sys.modules; from tril.model import nothing"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].startswith("ImportError: cannot import name 'nothing'")


@pytest.mark.slow
def test_the_notebook_runs_from_the_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TRIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the notebook makes its folder
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(Image=lambda *_, **__: None))
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "tour.ipynb").read_text("utf-8"))["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    lowest = 6 / 14 * math.log(8) * (1 + 6 / 57)  # six random letters of 14 characters, in windows of 57
    assert lowest < names["loss"] < lowest + 0.15
    assert names["short_loss"] > 12 / 14 * math.log(8)  # a window of 4 keys cannot copy
    assert names["certificate"].passed and not names["leaks"].passed


@pytest.mark.slow
def test_the_installed_wheel_trains_and_samples_beside_a_foreign_model(once, texts, tmp_path):
    site = once("site", install_wheel)
    (tmp_path / "model.py").write_text("raise RuntimeError('another module')", "utf-8")
    training = ("train", *merged(BARE, f"data.path={texts}", "trainer.max_steps=4"))
    sampling = ("sample", "ckpt=latest", "prompt=A red", "max_new_tokens=4")
    paths = {"PYTHONPATH": str(site), "TRIL_CACHE": str(tmp_path / "cache")}
    options = {"cwd": tmp_path, "env": os.environ | paths, "text": True, "timeout": 240}
    subprocess.check_output([site / "bin" / "tril", *training], **options)
    code = "import runpy, sys, tril.model as m; print(m.__file__); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-P", "-c", code, site / "bin" / "tril", *sampling]
    file, text = subprocess.check_output(command, **options).split("\n", 1)
    assert file.startswith(str(site)) and text.startswith("A red") and len(text) > len("A red\n")
