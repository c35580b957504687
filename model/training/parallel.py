"""How the processes of a run share its work: DDP, or FSDP2; and one end for all of them when one dies.

DDP: every process has the whole model, and gradients are averaged. FSDP2
(https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html): each parameter is sharded by rows over the
processes, and the parameters of one block at a time are gathered. In both, every process has batches of its own.
"""

import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning import Trainer
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer

from tril.model.gpt import GPT
from tril.model.initialization import SkipInit, init_parameter
from tril.model.training.optim import local, shard_of
from tril.model.training.settings import TrainerConfig

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole tensors, on rank 0 only
POLL_SECONDS, GRACE_SECONDS = 0.5, 10.0
TRAIN = Path(__file__).resolve().parents[2] / "train.py"


def make_strategy(config: TrainerConfig) -> Strategy | str:
    """The strategy of `lightning.Trainer` for a process group."""
    sharded = config.strategy == "model_parallel"
    return FSDP(tensor_parallel_size=1, save_distributed_checkpoint=False) if sharded else "ddp"


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


class FSDP(ModelParallelStrategy):
    """Lightning's strategy, with checkpoints that any number of processes continues.

    Lightning numbers the parameters of the optimizer in another way than torch does in a run of one process, and reads
    a file without verifying it.
    """

    def setup_environment(self) -> None:
        self._data_parallel_size = self.world_size
        super().setup_environment()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, numbered as torch numbers it in a run of one process."""
        assert self.model is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        state: dict[str, Any] = dict(get_optimizer_state_dict(self.model, optimizer, options=FULL))
        names = chain.from_iterable(group["params"] for group in state.get("param_groups", ()))
        return rename(state, {name: number for number, name in enumerate(names)}) if state else state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Every process reads the file and keeps its shards, so the number of processes may have changed."""
        assert self.model is not None
        checkpoint = self.checkpoint_io.load_checkpoint(self.broadcast(checkpoint_path))
        set_model_state_dict(self.model, checkpoint["state_dict"], options=FULL)
        names = {id(p): name for name, p in self.model.named_parameters()}
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            saved = chain.from_iterable(group["params"] for group in state["param_groups"])
            now = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            numbers = {number: names[id(p)] for number, p in zip(saved, now, strict=True)}
            set_optimizer_state_dict(self.model, optimizer, rename(state, numbers), options=FULL)
        return checkpoint

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()  # Lightning leaves this to the strategies that it saves by


def rename(state: dict[str, Any], keys: dict) -> dict[str, Any]:
    """The state of an optimizer with other keys for its parameters."""
    groups = [group | {"params": [keys[key] for key in group["params"]]} for group in state["param_groups"]]
    return {"state": {keys[key]: value for key, value in state["state"].items()}, "param_groups": groups}


def shard(model: GPT, mesh: DeviceMesh, device: torch.device) -> None:
    """Shards a GPT on the meta device over the processes; its initial weights are those of a whole one, bit for bit.

    Each parameter has a random stream of its own, so only one whole one is in memory at a time.
    """
    # About tensors that are sharded again, and about an output that nothing changes in place.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*returned a view tensor")
    if mesh.size() > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        register_fsdp_forward_method(model, "nll")
    model.to_empty(device=device)
    for name, p in model.named_parameters():
        whole = torch.empty(p.shape, dtype=p.dtype)
        init_parameter(whole, name, model.config, model.init_seed)
        with torch.no_grad():
            local(p).copy_(shard_of(whole.to(device), p))
    with device:
        model.make_tables()


def whole_copy(model: GPT) -> GPT | None:
    """The whole model on rank 0's CPU, in evaluation mode; None on other ranks. All ranks must call it."""
    weights = get_model_state_dict(model, options=FULL)
    if not weights:
        return None
    with SkipInit():
        whole = GPT(model.config)
    whole.load_state_dict(weights)
    return whole.eval()
