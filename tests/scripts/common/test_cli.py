"""What all entry points share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import assert_refused, run_python
from tril.scripts.common.cli import CONFIGS, check_writable

ROOT = CONFIGS.parent


@pytest.mark.parametrize("script", ["train.py", "scripts/sample.py"])
def test_a_reader_of_the_help_may_stop_reading(script, tmp_path):
    process = subprocess.Popen(
        [sys.executable, ROOT / script, "--help"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 141


@pytest.mark.parametrize(
    ("script", "argument"),
    [
        ("train.py", "resume=multirun/x/model.n_heads=1,seed=0"),
        ("scripts/certify.py", "ckpt=multirun/x/model.n_heads=1,seed=0"),
        ("scripts/control.py", "masked=multirun/x/model.n_heads=1,seed=0"),
        ("scripts/heads.py", "ckpt=multirun/x/model.n_heads=1,seed=0"),
        ("scripts/report.py", "dir=a (1)"),
        ("scripts/scaling.py", "dir=a (1)"),
        ("scripts/bench.py", "ckpt=a (1)"),
    ],
)
def test_paths_are_read_as_they_are_typed(script, argument, tmp_path):
    assert_refused(run_python(ROOT / script, argument, cwd=tmp_path), argument.partition("=")[2])
    done = run_python(ROOT / script, argument, cwd=tmp_path)
    assert "cannot read" not in done.stderr


def test_signs_elsewhere_are_explained(tmp_path):
    done = run_python(ROOT / "train.py", "data.name=a (1)", cwd=tmp_path)
    assert_refused(done, """cannot read 'data.name=a (1)'; put quotes within quotes, "data.name='...'\"""")


def test_a_folder_that_cannot_be_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert_refused(
        run_python(ROOT / "train.py", f"hydra.run.dir={tmp_path / 'file' / 'run'}", cwd=tmp_path),
        "choose another folder",
    )
    with pytest.raises(OSError, match="cannot write to .*run; choose another folder with out=FOLDER"):
        check_writable(tmp_path / "file" / "run", "out")
    check_writable(tmp_path / "new" / "run", "out")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != tmp_path
    )  # root may write wherever the disk does not forbid it
    with pytest.raises(OSError, match="cannot write to .*new"):
        check_writable(tmp_path / "new" / "run", "out")
