"""How the processes of a run share its work, DDP, and one end for all of them when one dies."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from lightning import Trainer
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from tril.model.training.settings import TrainerConfig

POLL_SECONDS, GRACE_SECONDS = 0.5, 10.0
TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def check_processes(config: TrainerConfig, total: int) -> None:
    """Raises ValueError unless `total` devices are as many as the processes that torchrun or srun started."""
    nodes, started = config.num_nodes, total
    if "RANK" in os.environ:  # set by torchrun
        started = int(os.environ["WORLD_SIZE"])
    elif config.is_distributed and SLURMEnvironment.detect():
        started = SLURMEnvironment().world_size()
    elif nodes > 1:
        needs = f"trainer.num_nodes={nodes} needs processes that torchrun or srun starts on every node"
        raise ValueError(f"{needs}; start with torchrun --nnodes={nodes}, or use trainer.num_nodes=1")
    if started != total:
        product = f"trainer.devices={total // nodes} * trainer.num_nodes={nodes}"
        raise ValueError(f"{product} must be {started}, the number of processes that were started; change one of them")


def watch_processes(trainer: Trainer, resume: str) -> None:
    """Replaces Lightning's launcher by ours, see `Launcher`, in a run of several processes."""
    if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        trainer.strategy._launcher = Launcher(trainer.strategy, resume)


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher, but a process that dies ends the run with one line; Lightning kills all without a word.

    A thread of each process waits for an end: in rank 0 for that of the others, in the others for that of rank 0.
    torchrun and Slurm watch their processes themselves.

    Args:
        resume: the command that continues the run.
    """

    def __init__(self, strategy: Any, resume: str) -> None:
        super().__init__(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
        self.resume, self._parent, self._ended = resume, os.getppid(), False

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            with mock.patch.object(sys, "argv", [str(TRAIN), *sys.argv[1:]]):  # `tril` is no file that Python can run
                self._call_children_scripts()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        is_watched = isinstance(environment, LightningEnvironment)
        if is_watched:
            threading.Thread(target=self._watch, daemon=True).start()
        try:
            return function(*args, **kwargs)
        except RuntimeError:  # perhaps of a connection, and the thread knows better why
            if is_watched:
                time.sleep(GRACE_SECONDS)
            raise
        finally:
            self._ended = True

    def _watch(self) -> None:
        is_first = self.cluster_environment.local_rank() == 0
        while not self._ended:
            time.sleep(POLL_SECONDS)
            failed = [(rank, process.returncode) for rank, process in enumerate(self.procs, 1) if process.poll()]
            if not failed and (is_first or os.getppid() == self._parent):
                continue
            time.sleep(POLL_SECONDS)  # the main thread may just end for a reason of its own, and say so
            if self._ended:
                return
            for process in self.procs:
                process.kill()
                process.wait()
            if failed:
                rank, status = failed[0]
                by = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                print(f"error: rank {rank} {by}; continue with {self.resume}", file=sys.stderr, flush=True)
            os._exit(1)
