"""Processes of one distributed run, for tests: started as torchrun starts them, and the first that fails ends all."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
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

    Raises:
        AssertionError: a rank failed or `timeout` seconds passed; says what each unfinished rank printed.
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
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(n_ranks)]
        ranks = [
            subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, env=os.environ | shared | own)
            for rank, output in enumerate(outputs)
            for own in [{"RANK": str(rank), "LOCAL_RANK": str(rank)}]
        ]
        deadline = time.monotonic() + timeout
        while True:
            statuses = [rank.poll() for rank in ranks]  # None: it runs, and may wait for one that failed
            if None not in statuses or any(statuses) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for rank in ranks:
            rank.kill()
            rank.wait()
        for output in outputs:
            output.seek(0)
        printed = [output.read() for output in outputs]
    failed = [f"rank {i}: status {status}\n{printed[i][-3000:]}" for i, status in enumerate(statuses) if status != 0]
    assert not failed, "\n".join(failed)
    return "\n".join(printed)
