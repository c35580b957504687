"""What all entry points share: free text on the command line, errors in one line, folders."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.calls import call
from tests.conftest import assert_refused
from tril import train
from tril.scripts import bench, certify, control, heads, report, scaling
from tril.scripts.common import cli
from tril.scripts.common.cli import CONFIGS, build, check_writable, command, explain, flatten


def test_reader_of_help_may_stop_reading(tmp_path):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, CONFIGS.parent / "scripts" / "report.py", "--help"],
        cwd=tmp_path,
        env=buffered,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 141


@pytest.mark.parametrize(
    ("script", "argument"),
    [
        (train, "resume=multirun/x/model.n_heads=1,seed=0"),
        (certify, "ckpt=multirun/x/model.n_heads=1,seed=0"),
        (control, "masked=multirun/x/model.n_heads=1,seed=0"),
        (heads, "ckpt=multirun/x/model.n_heads=1,seed=0"),
        (report, "dir=a (1)"),
        (scaling, "dir=a (1)"),
        (bench, "ckpt=a (1)"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_paths_are_free_text(script, argument, tmp_path):
    done = call(script.main, argument, cwd=tmp_path)
    assert_refused(done, argument.partition("=")[2])
    assert "cannot read" not in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]  # no log either


@pytest.mark.parametrize(
    "script", [certify, control, heads, report, scaling, bench], ids=lambda script: script.__name__
)
def test_help_and_errors_leave_no_file(script, tmp_path):
    assert call(script.main, "--help", cwd=tmp_path).returncode == 0
    assert call(script.main, "no_such_key=1", cwd=tmp_path).returncode == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.name=a (1)"], """cannot read 'data.name=a (1)'; put quotes within quotes, "data.name='...'\""""),
        (["model=nanoo"], "there is no model=nanoo; did you mean nano?"),
        (["model.n_head=2"], "there is no setting model.n_head; did you mean model.n_heads?"),
        (["zzzz=1"], "there is no setting zzzz; see python script.py --help"),
        (
            ["~trainer.max_steps"],
            "trainer.max_steps is missing and required; leave out ~trainer.max_steps, or set trainer.max_steps=VALUE",
        ),
        (["sweep.skipinvalid=true"], "there is no setting sweep.skipinvalid; did you mean sweep.skip_invalid?"),
        (["+ablation=heads"], "the ablation is a grid over model.n_heads; run it with python train.py -m, or choose"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_arguments_of_training_are_explained_in_one_line(arguments, message, tmp_path):
    assert_refused(call(train.main, *arguments, cwd=tmp_path), message)
    assert not list(tmp_path.rglob("*.*"))


def test_folder_that_hydra_cannot_create_is_refused(tmp_path):
    (tmp_path / "file").touch()
    done = call(train.main, f"hydra.run.dir={tmp_path / 'file' / 'run'}", cwd=tmp_path)
    assert_refused(done, "choose another folder")


@pytest.mark.parametrize("read", [lambda cfg: cfg.a.b, lambda cfg: cfg["a"]["b"]], ids=["attribute", "key"])
def test_missing_key_is_explained_with_its_full_name(read):
    cfg = OmegaConf.create({"a": {"c": 1}})
    OmegaConf.set_struct(cfg, True)
    with pytest.raises(OmegaConfBaseException) as error:
        read(cfg)
    assert explain(error.value, "train") == "a.b is missing and required; leave out ~a.b, or set a.b=VALUE"


def test_console_command_and_script_are_named_as_they_are_started(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tril report"])
    assert (cli.program(), command("train"), command("report")) == ("tril report", "tril train", "tril report")
    monkeypatch.setattr(sys, "argv", ["scripts/report.py"])
    assert cli.program() == "python scripts/report.py"
    assert (command("train"), command("report")) == ("python train.py", "python scripts/report.py")


def test_unknown_keys_and_values_of_a_settings_class_are_refused():
    settings = {"dir": "x", "baseline": None, "which": "final", "margin": None, "out": None, "publish": None}
    assert build(report.Settings, settings).which == "final"
    with pytest.raises(ValueError, match=re.escape("there is no setting baselin; did you mean baseline?")):
        build(report.Settings, settings | {"baselin": 1})
    with pytest.raises(ValueError, match=re.escape("there is no setting a.zz; choose one of a.baseline, a.dir, ")):
        build(report.Settings, settings | {"zz": 1}, "a")


def test_folder_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot write to .*run; choose another folder with out=FOLDER"):
        check_writable(tmp_path / "file" / "run", "out")
    check_writable(tmp_path / "new" / "run", "out")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(OSError, match="cannot write to .*new"):
        check_writable(tmp_path / "new" / "run", "out")


def test_flatten():
    tree = {"a": {"b": 1, "c": {"d": [2]}}, "e": {}, "f": None}
    assert flatten(tree) == {"a.b": 1, "a.c.d": [2], "f": None}
    assert flatten({"zero": {"low": 1}}, "_") == {"zero_low": 1}
