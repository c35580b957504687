"""Several processes: equal training on two ranks, a clean end when one of them dies, and the installed wheel."""

import os
import random
import shutil
import subprocess
import sys
import time

import psutil
import pytest
import torch

from tests.contract.harness import BARE, ROOT, TINY, merged, metrics, newest_run, process, start
from tril import load

pytestmark = pytest.mark.slow
BASE = (*(setting for setting in (*TINY, *BARE) if "tokenizer" not in setting), "data.tokenizer.kind=byte")
RANKS = {"one": ("data.batch_size=6",), "two": ("trainer=ddp", "trainer.devices=2", "data.batch_size=3")}


def trained(cwd, *settings):
    cwd.mkdir()
    done = process("train", *merged(BASE, *settings), cwd=cwd)
    assert done.status == 0 and len(list(cwd.glob("outputs/*/*"))) == 1, done.err
    return newest_run(cwd)


def test_two_processes_train_as_one_with_the_same_batch(texts, tmp_path):
    one, two = (trained(tmp_path / name, f"data.path={texts}", *ranks) for name, ranks in RANKS.items())
    for column in ("train/loss", "val/loss", "grad_norm/total", "train/tokens"):
        assert metrics(two, column) == pytest.approx(metrics(one, column), rel=1e-5), column


@pytest.mark.parametrize("ranks", RANKS)
def test_every_training_token_is_read_once_in_an_epoch(ranks, texts, tmp_path):
    """The loss of an untrained model depends on a token and the next one alone, so its mean tells which were read."""
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz \n", k=8 * 6 * 32 - 5))  # 8 steps
    (tmp_path / "text.txt").write_text(text, "utf-8")
    still = ("optim.lr_scale=1e-30", "trainer.max_steps=16", "trainer.log_every_n_steps=8")
    paths = (f"data.path={tmp_path / 'text.txt'}", f"data.val_path={texts.parent / '00.txt'}")
    folder = trained(tmp_path / "run", *paths, *still, *RANKS[ranks])
    lm = load(str(folder), device="cpu")
    ids = torch.tensor([*lm.tokenizer.encode(text).ids, lm.tokenizer.token_to_id("<|endoftext|>")])
    with torch.no_grad():
        nats = -lm.model(ids[:-1, None])[:, 0].double().log_softmax(-1).gather(1, ids[1:, None])
    assert metrics(folder, "train/loss") == pytest.approx(dict.fromkeys((8, 16), nats.mean().item()), rel=1e-6)


def test_a_killed_process_ends_the_run_with_one_line_and_no_process_is_left(texts, tmp_path):
    long = ("trainer.max_steps=100000", "trainer.val_check_interval=10", f"data.path={texts}")
    started, deadline = start("train", *merged(BASE, *long, *RANKS["two"]), cwd=tmp_path), time.monotonic() + 200
    while not list(tmp_path.rglob("last.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.2)
    family = psutil.Process(started.pid).children(recursive=True)
    next(child for child in family if "train.py" in " ".join(child.cmdline())).kill()
    *_, line = started.communicate(timeout=120)[1].splitlines()
    assert started.returncode == 1 and line.startswith("error: rank 1 ") and f"resume={newest_run(tmp_path)}" in line
    assert not psutil.wait_procs(family, timeout=30)[1]


def test_the_installed_wheel_trains_and_samples_beside_a_foreign_model(texts, tmp_path):
    skipped = shutil.ignore_patterns(".*", "tests", "docs", "outputs", "build", "*.egg-info")
    source, site = shutil.copytree(ROOT, tmp_path / "source", ignore=skipped), tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "-q", "install", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "--target", site, source], check=True, timeout=240)  # builds a wheel
    shutil.rmtree(source)
    (tmp_path / "model.py").write_text("raise RuntimeError('another module')", "utf-8")
    paths = {"PYTHONPATH": str(site), "TRIL_CACHE": str(tmp_path / "cache")}
    options = {"cwd": tmp_path, "env": os.environ | paths, "text": True, "timeout": 240}
    training = ("train", *merged(BASE, f"data.path={texts}", "trainer.max_steps=4"))
    sampling = ("sample", "ckpt=latest", "prompt=A red", "max_new_tokens=4")
    outputs = [subprocess.check_output([site / "bin" / "tril", *each], **options) for each in (training, sampling)]
    assert outputs[1].startswith("A red") and len(outputs[1]) > len("A red\n")
    code = subprocess.check_output([sys.executable, "-P", "-c", "import tril.model as m; print(m.__file__)"], **options)
    assert code.startswith(str(site))
