"""Runs of several processes (DDP, torchrun): they go on as each other, and have one folder and one log."""

import re
import socket

import numpy as np
import pytest
import torch

from tests.contract.harness import BARE, ROOT, TINY, Process, merged, metrics, run
from tril.model.checkpoint import read_state
from tril.model.runs import Run

LIMIT = 1e-5
# Rates of a small model: at those of the default model it is chaotic, and repeats of one process differ by 1e-4 when
# their sums have another order. With a constant rate, the steps of a run do not depend on its length.
STEPS = ("optim.lr_scale=0.1", "optim.schedule.kind=constant", "data.tokenizer.kind=byte", "data.val_batch_size=5")
STEPS += ("trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5", "trainer.val_check_interval=4")
ONE = ("trainer.strategy=auto", "trainer.devices=1", "data.batch_size=2")
DDP = ("trainer.strategy=ddp", "trainer.devices=2", "data.batch_size=1")  # as many windows in a step
ONCE = (r"^model   ", r"^folder  ", r"^step +4  validation", r"^  validation  ", r"^--- sample 1 of 3")


def assert_same_run(folder, expected):
    columns = [
        key for row in Run(expected).metrics for key in row if key.startswith(("train/loss", "val/", "grad_norm", "lr"))
    ]
    assert {"train/loss", "val/loss", "val/bpb", "grad_norm/total"} <= {*columns}
    for key in (*columns, "train/tokens"):
        assert metrics(folder, key) == pytest.approx(metrics(expected, key), abs=LIMIT, rel=LIMIT), key
    state, other = (read_state(each / "checkpoints" / "last.ckpt") for each in (folder, expected))
    [optimizer], [other_optimizer] = state["optimizer_states"], other["optimizer_states"]
    pairs = [(state["state_dict"][key], value) for key, value in other["state_dict"].items()]
    for number, values in other_optimizer["state"].items():
        pairs += [(optimizer["state"][number][key], value) for key, value in values.items()]
    assert all(x.shape == y.shape and type(x) is torch.Tensor and (x - y).abs().max() <= LIMIT for x, y in pairs)
    windows, expected = (np.load(each / "windows_last.npz") for each in (folder, expected))
    for key in expected:  # in batches of 5: two ranks have unequal shares
        assert np.allclose(windows[key], expected[key], rtol=LIMIT, atol=LIMIT), key


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def of_torchrun(rank: int, port: str) -> dict[str, str]:
    """The variables that torchrun sets for one of the two processes of a node."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}


def train_ranks(cwd, *words):
    """Two processes, as torchrun starts them on one node."""
    port = free_port()
    ranks = [Process("train", *words, cwd=cwd, **of_torchrun(rank, port)) for rank in (0, 1)]
    [rank.done().succeeded() for rank in ranks]


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_ddp_and_then_with_one_again(texts, run_of, tmp_path):
    settings = (*STEPS, f"data.val_path={texts.parent}/39.txt")
    words = merged(BARE, f"data.path={texts}", *settings, *ONE, "trainer.max_steps=4", "hydra.run.dir=run")
    run("train", *words, cwd=tmp_path).succeeded()
    train_ranks(tmp_path, "resume=run", *DDP, "trainer.max_steps=8")
    run("train", "resume=run", *ONE, "trainer.max_steps=12", cwd=tmp_path).succeeded()
    assert_same_run(tmp_path / "run", run_of(*settings, *ONE, "trainer.max_steps=12"))


@pytest.mark.slow
def test_two_nodes_of_torchrun_are_one_run_which_goes_on_as_one_node(texts, tmp_path):
    """The nodes are on this machine. With dropout: each of the two processes has its random numbers again."""
    nodes = ("trainer=ddp", "trainer.num_nodes=2", "trainer.devices=1", "hydra.run.dir=outputs/one/folder")
    text = f"data.path={texts}", f"data.val_path={texts.parent}/39.txt"
    settings = merged(TINY, *text, *nodes, "data.batch_size=1", "model.resid_dropout=0.1", *STEPS)
    torchrun = "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"
    words = ROOT / "train.py", *merged(settings, "trainer.max_steps=4")
    started = [Process("torchrun", *torchrun, f"--node-rank={rank}", *words, cwd=tmp_path) for rank in (0, 1)]
    first, second = (node.done().succeeded() for node in started)
    assert [path.parent.name for path in tmp_path.glob("outputs/*/*/summary.json")] == ["folder"]
    assert second.stdout == "" and not re.findall("Warning|INFO", first.stdout + first.stderr)
    for line in ONCE:
        assert len(re.findall(line, first.stdout, re.MULTILINE)) == 1, (line, first.stdout)

    node = "trainer.num_nodes=1", "trainer.devices=2", "trainer.max_steps=8"
    train_ranks(tmp_path, "resume=outputs/one/folder", *node)
    train_ranks(tmp_path, *merged(settings, *node, *BARE[-3:], "hydra.run.dir=whole"))  # nothing but training
    assert_same_run(tmp_path / "outputs/one/folder", tmp_path / "whole")


def test_processes_of_torchrun_must_be_those_of_the_settings_and_need_one_folder(tmp_path, text):
    environment = of_torchrun(0, "0") | {"TRIL_CACHE": str(tmp_path / "c")}
    words = "train", *TINY, f"data.path={text}"
    run(*words, cwd=tmp_path, **environment).refused("trainer.devices=1 * trainer.num_nodes=1", "2")
    run(*words, "trainer=ddp", "trainer.devices=2", cwd=tmp_path, **environment).refused("hydra.run.dir=FOLDER")
