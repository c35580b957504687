"""Processes of one distributed run, for tests: started as torchrun starts them, without its agent."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run_ranks(n_ranks: int, module: str, *arguments: str | Path, timeout: float = 240) -> str:
    """`python -m MODULE ARGUMENTS` on n ranks of one machine.

    Returns:
        What they printed.
    """
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",  # by which Lightning recognizes torchrun
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    command = [sys.executable, "-m", module, *map(str, arguments)]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8"}
    ranks = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, **options)
        for rank in range(n_ranks)
    ]
    try:
        printed = "\n".join(process.communicate(timeout=timeout)[0] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert all(process.returncode == 0 for process in ranks), printed[-5000:]
    return printed
