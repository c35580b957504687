"""Runs of several processes (DDP, FSDP2, torchrun): they go on as each other, and have one folder and one log."""

import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.calls import call
from tests.conftest import assert_refused
from tests.contract.harness import BARE, ROOT, TINY, merged, metrics, newest_run, run
from tests.runs import rows
from tril import train
from tril.model.checkpoint import read_state

LIMIT = 1e-5
# Rates of a small model: at those of the default model it is chaotic, and repeats of one process differ by 1e-4 when
# their sums have another order. With a constant rate, the steps of a run do not depend on its length.
STEPS = ("optim.lr_scale=0.1", "optim.schedule.kind=constant", "data.tokenizer.kind=byte", "data.val_batch_size=5")
STEPS += ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5", "trainer.val_check_interval=10")
ONE = ("trainer.strategy=auto", "trainer.devices=1", "data.batch_size=2")
TWO = ("trainer.devices=2", "data.batch_size=1")  # as many windows in a step
WAYS = {"one": ONE, "ddp": (*TWO, "trainer.strategy=ddp"), "fsdp": (*TWO, "trainer.strategy=model_parallel")}
ONCE = (r"^model   ", r"^folder  ", r"^step +20  validation", r"^  validation  ", r"^--- sample 1 of 3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then", "whole"), [("ddp", "ddp", "ddp"), ("fsdp", "one", "one"), ("one", "fsdp", "one")]
)
def test_a_run_of_one_kind_goes_on_as_another_one(first, then, whole, texts, run_of, tmp_path):
    """After half of its steps. With dropout where the processes, of which each has random numbers, are the same."""
    settings = (*STEPS, f"model.resid_dropout={0.1 if whole == 'ddp' else 0}", f"data.val_path={texts.parent}/39.txt")
    expected = run_of(*settings, *WAYS[whole], "trainer.max_steps=20")
    words = merged(BARE, f"data.path={texts}", *settings, *WAYS[first], "trainer.max_steps=10")
    run("train", *words, cwd=tmp_path).succeeded()
    folder = newest_run(tmp_path)
    run("train", f"resume={folder}", *WAYS[then], "trainer.max_steps=20", cwd=tmp_path).succeeded()

    columns = [key for key in rows(expected)[0] if key.startswith(("train/loss", "val/", "grad_norm", "lr"))]
    assert {"train/loss", "val/loss", "val/bpb"} <= {*columns}
    for key in columns:
        assert metrics(folder, key) == pytest.approx(metrics(expected, key), abs=LIMIT, rel=LIMIT), key
    states = [read_state(each / "checkpoints" / "last.ckpt") for each in (folder, expected)]
    [mine], [theirs] = (state["optimizer_states"] for state in states)
    pairs = [(states[0]["state_dict"][key], value) for key, value in states[1]["state_dict"].items()]
    for number, state in theirs["state"].items():
        pairs += [(mine["state"][number][key], value) for key, value in state.items()]
    assert all(x.shape == y.shape and type(x) is torch.Tensor and (x - y).abs().max() <= LIMIT for x, y in pairs)
    windows = [np.load(each / "windows_last.npz") for each in (folder, expected)]
    for key in windows[1]:  # in batches of 5: two ranks have unequal shares
        assert np.allclose(windows[0][key], windows[1][key], rtol=LIMIT, atol=LIMIT), key


@pytest.mark.slow
def test_two_nodes_of_torchrun_are_one_run_with_one_folder_and_one_log(texts, tmp_path):
    """The nodes are on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ("trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "hydra.run.dir=outputs/one/folder")
    settings = merged(TINY, f"data.path={texts}", *settings, "trainer.max_steps=20", "trainer.val_check_interval=20")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "cwd": tmp_path}
    options["env"] = os.environ | {"TRIL_CACHE": f"{tmp_path}/cache", "OMP_NUM_THREADS": "1"}
    commands = ([*torchrun, f"--node-rank={number}", str(ROOT / "train.py"), *settings] for number in (0, 1))
    nodes = [subprocess.Popen(command, **options) for command in commands]
    try:
        (out, err), (other_out, other_err) = (node.communicate(timeout=300) for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], err + other_err
    assert [path.parent.name for path in tmp_path.glob("outputs/*/*/summary.json")] == ["folder"] and other_out == ""
    for line in ONCE:
        assert len(re.findall(line, out, re.MULTILINE)) == 1, (line, out)
    assert "Warning" not in err and "INFO" not in out + err


def test_processes_of_torchrun_must_be_those_of_the_settings_and_need_one_folder(tmp_path, text):
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TRIL_CACHE": str(tmp_path / "c")}
    done = call(train.main, *TINY, f"data.path={text}", cwd=tmp_path, **environment)
    limit = "must be 2, the number of processes that were started; change one of them"
    assert_refused(done, f"trainer.devices=1 * trainer.num_nodes=1 {limit}")
    settings, environment = ("trainer=ddp", "trainer.devices=2"), environment | {"TORCHELASTIC_RUN_ID": "x"}
    done = call(train.main, *TINY, *settings, f"data.path={text}", cwd=tmp_path, **environment)
    assert_refused(done, "torchrun and srun start processes that need one folder; add hydra.run.dir=FOLDER")
