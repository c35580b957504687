"""The processes of a run with many devices: data ranks times tensor ranks."""

from dataclasses import dataclass

from tril.model.training.division import check_division
from tril.scripts.common.run_config import RunConfig


@dataclass(frozen=True)
class ProcessGrid:
    """One process per device.

    Args:
        data_ranks: processes, or groups of them, that each have batches of their own.
        tensor_ranks: processes that share a batch.
        sharded: FSDP2 divides the parameters over the data ranks; otherwise DDP copies them.
    """

    data_ranks: int
    tensor_ranks: int
    sharded: bool

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tensor_ranks

    @property
    def parameters_divided(self) -> bool:
        return self.sharded and self.world_size > 1


def grid_of(run: RunConfig, world_size: int) -> ProcessGrid:
    """The processes of the run on `world_size` devices.

    Raises:
        ValueError: the model cannot be divided over them.
    """
    if run.trainer.strategy != "model_parallel":
        return ProcessGrid(world_size, 1, sharded=False)
    tensor_ranks = run.trainer.tensor_parallel_size or world_size
    check_division(run.model, world_size, tensor_ranks, None if run.hardware is None else run.hardware.compile)
    return ProcessGrid(world_size // tensor_ranks, tensor_ranks, sharded=True)
