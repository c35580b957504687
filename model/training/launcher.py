"""Starts the processes of a run on this machine, and ends all of them when one dies."""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

import __main__
from tril.model.training.errors import RankFailed

POLL_SECONDS = 0.5
GRACE_SECONDS = 10.0  # for the process that explains the failure; the others are silent meanwhile
CONNECTION = re.compile(r"gloo|NCCL|ProcessGroup|Connection (closed|reset)|DistBackendError", re.IGNORECASE)
TRAIN = Path(__file__).resolve().parents[2] / "train.py"


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, with one clear end when a process dies.

    Lightning kills all processes, itself included, without a word. Here the first process names the one that died, and
    a process whose parent died ends, so that none is left over. torchrun and Slurm watch their processes themselves.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._local = isinstance(self.cluster_environment, LightningEnvironment)  # this class starts the processes
        self._is_child = self._local and self.cluster_environment.local_rank() > 0
        self._parent = os.getppid()
        self._running = self._watches = False

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            with runnable_program():
                self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        self._running = True
        if self._local and not self._watches:
            self._watches = True
            threading.Thread(target=self._watch, daemon=True, name="watch-ranks").start()
        try:
            return function(*args, **kwargs)
        except RankFailed:
            raise
        except Exception as error:
            self._explain(error)
            raise
        finally:
            self._running = False

    def _explain(self, error: Exception) -> None:
        """Raises RankFailed if another process is the cause of the error. A child waits for its parent to explain."""
        is_connection = CONNECTION.search(f"{type(error).__name__}: {error}") is not None
        if not self._local:
            if is_connection:
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise RankFailed(f"another process of the run has ended ({first})") from error
            return
        deadline = time.monotonic() + (GRACE_SECONDS if is_connection or self._is_child else 0.0)
        while (reason := self._failure()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._kill_children()
        if reason is not None:
            self._end_if_redundant()
            raise RankFailed(reason) from error

    def _watch(self) -> None:
        """Ends this process if another one has died and the main thread does not notice, as in a call that hangs."""
        while (reason := self._failure()) is None or not self._running:
            time.sleep(POLL_SECONDS)
        time.sleep(2 * GRACE_SECONDS)
        if self._running:
            self._kill_children()
            self._end_if_redundant()
            print(f"error: {reason}", file=sys.stderr, flush=True)
            os._exit(1)

    def _failure(self) -> str | None:
        """Which process has died, and how; None: none."""
        if self._is_child:
            return None if os.getppid() == self._parent else "rank 0 has ended"
        for rank, process in enumerate(self.procs, 1):
            if status := process.poll():
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                return f"rank {rank} {how}"
        return None

    def _end_if_redundant(self) -> None:
        """Of the children without a parent, the first one tells why."""
        if self._is_child and self.cluster_environment.local_rank() > 1:
            os._exit(1)

    def _kill_children(self) -> None:
        for process in self.procs:
            process.kill()
            process.wait()


@contextlib.contextmanager
def runnable_program() -> Iterator[None]:
    """In the block, sys.argv[0] is a file that Python can run, also under the `tril` command."""
    program = sys.argv[0]
    if __main__.__spec__ is None and not Path(program).is_file():
        sys.argv[0] = str(TRAIN)
    try:
        yield
    finally:
        sys.argv[0] = program
