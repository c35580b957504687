"""How the processes of a run share its work: Lightning's strategies for DDP, and for FSDP2 with tensor parallelism.

W processes; with model_parallel they form a mesh of W / t data ranks and t tensor ranks. Tensor ranks share a batch.
"""

import contextlib
import os
from collections.abc import Iterator
from itertools import chain
from typing import Any

from lightning import Trainer
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from tril.model.config import GPTConfig
from tril.model.training.division import check_division
from tril.model.training.hardware import Hardware
from tril.model.training.launcher import Launcher
from tril.model.training.parallel import FULL, place_gradients
from tril.model.training.trainer_config import TrainerConfig


class DDP(DDPStrategy):
    """Every process has the whole model; gradients are averaged after the last micro-batch of a step."""

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)


class ModelParallel(ModelParallelStrategy):
    """FSDP2 over the data ranks and tensor parallelism over the tensor ranks. Checkpoints hold whole tensors.

    Args:
        tensor_parallel_size: tensor ranks; None: all processes.
    """

    def __init__(self, tensor_parallel_size: int | None) -> None:
        super().__init__(save_distributed_checkpoint=False)
        self._tensor_ranks = tensor_parallel_size
        self._places_gradients = True  # after a backward pass

    @property
    def tensor_ranks(self) -> int:
        return self.world_size if self._tensor_ranks is None else self._tensor_ranks

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        self._tensor_parallel_size = self.tensor_ranks
        self._data_parallel_size = self.world_size // self.tensor_ranks
        super().setup_environment()

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """No gradient is reduced in the block, which has all micro-batches of a step but the last."""
        assert self.model is not None
        shards = [module for module in self.model.children() if isinstance(module, FSDPModule)]
        for module in shards:
            module.set_requires_gradient_sync(False)
        self._places_gradients = False
        yield
        self._places_gradients = True
        for module in shards:
            module.set_requires_gradient_sync(True)

    def post_backward(self, closure_loss: Tensor) -> None:
        if self._places_gradients:
            assert self.model is not None
            place_gradients(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, numbered as torch numbers it in a run of one process."""
        assert self.model is not None
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        state: dict[str, Any] = dict(get_optimizer_state_dict(self.model, optimizer, options=FULL))
        if not state:
            return state  # not rank 0
        names = chain.from_iterable(group["params"] for group in state["param_groups"])
        return renamed(state, {name: number for number, name in enumerate(names)})

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
            set_optimizer_state_dict(self.model, optimizer, renamed(state, numbers), options=FULL)
        return checkpoint

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()  # Lightning leaves this to the strategies that it saves by


def renamed(state: dict[str, Any], keys: dict) -> dict[str, Any]:
    """The state of an optimizer with other keys for its parameters."""
    return {
        "state": {keys[key]: value for key, value in state["state"].items()},
        "param_groups": [group | {"params": [keys[key] for key in group["params"]]} for group in state["param_groups"]],
    }


def make_strategy(config: TrainerConfig, devices: Any) -> Strategy | str:
    """The strategy of `lightning.Trainer`; on one device its default."""
    if config.strategy == "model_parallel":
        return ModelParallel(config.tensor_parallel_size)
    if config.strategy == "auto" and devices == 1 and config.num_nodes == 1:
        return "auto"
    return DDP()


def tensor_ranks(trainer: Trainer | None) -> int:
    """The processes that share one batch."""
    strategy = getattr(trainer, "strategy", None)
    return strategy.tensor_ranks if isinstance(strategy, ModelParallel) else 1


def check_processes(trainer: Trainer) -> None:
    """Raises ValueError unless the settings are those of the processes that torchrun or srun started."""
    devices, nodes = trainer.num_devices, trainer.num_nodes
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, LightningEnvironment) and nodes > 1:
        needs = f"trainer.num_nodes={nodes} needs processes that torchrun or srun starts on every node"
        raise ValueError(f"{needs}; start with torchrun --nnodes={nodes}, or use trainer.num_nodes=1")
    started = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else devices * nodes  # torchrun sets both
    if isinstance(environment, SLURMEnvironment):
        started = environment.world_size()
    if started != devices * nodes:
        product = f"trainer.devices={devices} * trainer.num_nodes={nodes}"
        raise ValueError(f"{product} must be {started}, the number of processes that were started; change one of them")


def check_parallel(trainer: Trainer, model: GPTConfig, hardware: Hardware) -> None:
    """Raises ValueError if the model or the settings cannot be divided over the processes of the run."""
    check_processes(trainer)
    if not isinstance(trainer.strategy, ModelParallel):
        return
    check_division(model, trainer.world_size, tensor_ranks(trainer), hardware.compile)
