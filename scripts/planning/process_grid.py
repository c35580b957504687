"""The processes of a run with many devices."""

from dataclasses import dataclass

from tril.scripts.cli.config import RunConfig


@dataclass(frozen=True)
class ProcessGrid:
    """One process per device, which has batches of its own.

    Args:
        sharded: FSDP2 shards the parameters over the processes; otherwise DDP copies them.
    """

    world_size: int
    sharded: bool

    @property
    def parameters_divided(self) -> bool:
        return self.sharded and self.world_size > 1


def grid_of(run: RunConfig, world_size: int) -> ProcessGrid:
    """The processes of the run on `world_size` devices."""
    return ProcessGrid(world_size, sharded=run.trainer.strategy == "model_parallel")
