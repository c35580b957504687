"""Several processes, of which one dies, and the installed wheel; test_training and test_own_text compare two ranks."""

import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from tests.contract.harness import BARE, TINY, copy_project, merged, newest_run, start

pytestmark = pytest.mark.slow


def test_a_killed_process_ends_the_run_with_one_line_and_no_process_is_left(texts, tmp_path):
    ranks = ("trainer=ddp", "trainer.devices=2", "trainer.max_steps=100000", "trainer.val_check_interval=10")
    settings = merged((*TINY, *BARE), f"data.path={texts}", *ranks)
    started, deadline = start("train", *settings, cwd=tmp_path), time.monotonic() + 200
    while not list(tmp_path.rglob("last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    family = psutil.Process(started.pid).children(recursive=True)
    next(child for child in family if "train.py" in " ".join(child.cmdline())).kill()
    *_, line = started.communicate(timeout=120)[1].splitlines()
    assert started.returncode == 1 and line.startswith("error: rank 1 ") and f"resume={newest_run(tmp_path)}" in line
    assert not psutil.wait_procs(family, timeout=30)[1]


def test_the_installed_wheel_trains_and_samples_beside_a_foreign_model(texts, tmp_path):
    source, site = copy_project(tmp_path / "source"), tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "--target", site, source], check=True, timeout=240)  # builds a wheel
    shutil.rmtree(source)
    (tmp_path / "model.py").write_text("raise RuntimeError('another module')", "utf-8")
    paths = {"PYTHONPATH": str(site), "TRIL_CACHE": str(tmp_path / "cache")}
    options = {"cwd": tmp_path, "env": os.environ | paths, "text": True, "timeout": 240}
    training = ("train", *merged((*TINY, *BARE), f"data.path={texts}", "trainer.max_steps=4"))
    sampling = ("sample", "ckpt=latest", "prompt=A red", "max_new_tokens=4")
    outputs = [subprocess.check_output([site / "bin" / "tril", *each], **options) for each in (training, sampling)]
    assert outputs[1].startswith("A red") and len(outputs[1]) > len("A red\n")
    code = subprocess.check_output([sys.executable, "-P", "-c", "import tril.model as m; print(m.__file__)"], **options)
    assert code.startswith(str(site))
