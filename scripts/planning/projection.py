"""A run on many GPUs, calculated from its settings and a few assumptions."""

from dataclasses import dataclass, replace

import torch

from tril.model.gpt import GPT
from tril.model.training.hardware import Hardware, peak_flops
from tril.scripts.cli.config import RunConfig
from tril.scripts.planning.communication import sent_per_step
from tril.scripts.planning.plan_config import PlanConfig
from tril.scripts.planning.process_grid import grid_of
from tril.scripts.planning.rank_memory import RankMemory, RankModel
from tril.scripts.planning.step_memory import ALLOCATOR_FACTOR, largest_batch

AUTO_PRECISION = "bf16-mixed"  # trainer.precision=auto on a GPU


@dataclass(frozen=True)
class Projection:
    """A run on `world_size` GPUs.

    Args:
        largest_batch: the largest data.batch_size that fits; 0: none.
        tokens: per step.
        sent: what is sent -> bytes per step and GPU.
        compute, communication: seconds per step.
    """

    world_size: int
    memory: RankMemory
    largest_batch: int
    tokens: int
    sent: dict[str, float]
    compute: float
    communication: float

    @property
    def seconds(self) -> float:
        """Of a step in which nothing is sent while the GPU computes."""
        return self.compute + self.communication


def project(run: RunConfig, plan: PlanConfig, world_size: int) -> Projection:
    """The run on `world_size` GPUs of the kind `plan.gpu`."""
    grid, hardware = grid_of(run, world_size), gpu_hardware(run, plan.gpu)
    rank = RankModel(run.model, run.optim, hardware, grid)
    batch_size, accumulate = run.data.batch_size, run.accumulate
    tokens = run.tokens_per_step() * grid.world_size
    with torch.device("meta"):
        flops = tokens * GPT(run.model).flops_per_token(masked=True)  # as MFU counts them
    assert hardware.peak_flops is not None
    sent = sent_per_step(rank, accumulate)
    return Projection(
        world_size,
        rank.memory(batch_size, accumulate),
        batch_that_fits(rank, batch_size, accumulate, plan.gpu_memory * 1e9 / ALLOCATOR_FACTOR["cuda"]),
        tokens,
        sent,
        compute=flops / (world_size * hardware.peak_flops * plan.mfu),
        communication=sum(sent.values()) / (plan.link * 1e9),
    )


def gpu_hardware(run: RunConfig, gpu: str) -> Hardware:
    """The GPU in the run's precision. Without CUDA here, tensors without content are those of a CPU."""
    assert run.hardware is not None
    precision = run.trainer.precision if run.trainer.precision != "auto" else AUTO_PRECISION
    here = replace(memory_hardware(run.hardware), device_name=gpu, peak_flops=peak_flops(gpu), compile=None)
    return here if here.accelerator == "cuda" else replace(here, precision=precision)


def memory_hardware(hardware: Hardware) -> Hardware:
    """The device whose kernels decide how much memory a step takes: there are none for MPS without its driver."""
    return hardware if hardware.accelerator == "cuda" else replace(hardware, accelerator="cpu")


def batch_that_fits(rank: RankModel, batch_size: int, accumulate: int, budget: float) -> int:
    """The largest data.batch_size whose step takes at most `budget` bytes of tensors; 0: none."""
    memory, double = rank.memory(batch_size, accumulate), rank.memory(2 * batch_size, accumulate)
    if memory.update_peak > budget:
        return 0
    return max(0, largest_batch((memory.passes, double.passes), batch_size, budget))
