"""torchrun on two nodes: two network namespaces of this machine, connected by a virtual cable (Linux, as root)."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.ranks import free_port
from tests.test_ddp import TRAIN, check_one_run, finish, start

NODES = ("10.77.0.1", "10.77.0.2")  # the network has these two addresses only


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def nodes():
    """The names of two network namespaces; the interface of node i is nodei."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("needs the command ip of Linux")
    names = [f"tril-{os.getpid()}-{i}" for i in range(2)]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "node0", "netns", names[0], "type", "veth", "peer", "name", "node1", "netns", names[1])
        for i, (name, address) in enumerate(zip(names, NODES, strict=True)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", f"node{i}")
            run("ip", "-n", name, "link", "set", f"node{i}", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "delete", names[0]], capture_output=True)
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    yield names
    for name in names:
        run("ip", "netns", "delete", name)


@pytest.mark.parametrize(
    "trainer", [pytest.param("ddp", marks=pytest.mark.slow), pytest.param("fsdp", marks=pytest.mark.long)]
)
def test_two_nodes_are_one_run(tmp_path, text, nodes, trainer):
    settings = [f"trainer={trainer}", "trainer.num_nodes=2", "trainer.devices=1", f"data.path={text}"]
    settings.append("hydra.run.dir=outputs/one/folder")
    port, processes = free_port(), []
    for i, name in enumerate(nodes):
        torchrun = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            f"--node-rank={i}",
            "--nproc-per-node=1",
        )
        torchrun += (f"--master-addr={NODES[0]}", f"--master-port={port}", TRAIN)
        program = ("ip", "netns", "exec", name, *torchrun)
        processes.append(start(*settings, cwd=tmp_path, program=program, GLOO_SOCKET_IFNAME=f"node{i}"))
    (status, stdout, stderr), (other_status, other_stdout, other_stderr) = map(finish, processes)
    assert (status, other_status) == (0, 0), stderr + other_stderr
    check_one_run(tmp_path, stdout, stderr)
    assert other_stdout == ""
