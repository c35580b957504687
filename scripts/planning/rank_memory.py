"""Memory of one process of many: what each has of weights, gradients and optimizer state, and what it gathers."""

import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tril.model.config import GPTConfig
from tril.model.gpt import GPT
from tril.model.training.hardware import Hardware
from tril.model.training.optim import OptimConfig, by_shape, param_groups
from tril.scripts.planning.process_grid import ProcessGrid
from tril.scripts.planning.step_memory import StepMemory, n_bytes, step_memory

OPTIMIZER_TENSORS = {"muon": 1, "adamw": 2}  # momentum; averages of the gradient and of its square


step_memory_once = functools.cache(step_memory)


@dataclass(frozen=True)
class RankMemory(StepMemory):
    """Bytes on one device, in a step of a run on many.

    Args:
        gathered: in forward and backward pass, what FSDP2 gathers of the others' weights.
        buckets: in the whole step, DDP's copy of the gradients that it sends.
    """

    gathered: int = 0
    buckets: int = 0

    @property
    def forward_peak(self) -> int:
        return super().forward_peak + self.gathered + self.buckets

    @property
    def backward_peak(self) -> int:
        return super().backward_peak + self.gathered + self.buckets

    @property
    def update_peak(self) -> int:
        return super().update_peak + self.buckets


@dataclass(frozen=True)
class RankModel:
    """The part of a model that one process has, with the memory of a step."""

    config: GPTConfig
    optim: OptimConfig
    hardware: Hardware
    grid: ProcessGrid

    @functools.cached_property
    def parts(self) -> GPT:
        """The parameters, without content."""
        with torch.device("meta"):
            return GPT(self.config)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one number of a weight, its gradient or its optimizer state."""
        return 2 if self.hardware.precision == "bf16-true" else 4

    def share(self, parameters: Iterable[Tensor]) -> int:
        """Bytes that the first rank has: FSDP2 divides rows, and rounds up."""
        ranks = self.grid.world_size if self.grid.sharded else 1
        return self.weight_bytes * sum(-(-p.shape[0] // ranks) * (p.numel() // p.shape[0]) for p in parameters)

    @functools.cached_property
    def block(self) -> int:
        """Bytes of the parameters of one block."""
        return self.weight_bytes * sum(p.numel() for p in self.parts.blocks[0].parameters())

    @functools.cached_property
    def root(self) -> int:
        """Bytes of the parameters outside of the blocks, which FSDP2 gathers once for the whole pass."""
        return self.weight_bytes * self.parts.n_parameters() - self.block * self.config.n_layers

    def memory(self, batch_size: int, accumulate: int) -> RankMemory:
        """Memory with `batch_size` windows per micro-batch."""
        options = {"accumulate": accumulate > 1}
        whole = step_memory_once(self.config, self.optim, batch_size, self.hardware, **options)
        if not self.grid.parameters_divided:
            # torch's DistributedDataParallel copies gradients into buckets, unless gradient_as_bucket_view is set
            buckets = whole.gradients if self.grid.world_size > 1 else 0
            return RankMemory(**vars(whole), buckets=buckets)
        return self._divided(whole)

    def _divided(self, step: StepMemory) -> RankMemory:
        """Memory with FSDP2. Muon orthogonalizes whole matrices on every rank."""
        # FSDP2 has gathered what is outside of the blocks, and one block. In the backward pass of a block three more
        # exist: the next block, the gradients of this one, and the copy of them that is sent.
        gradients = self.share(self.parts.parameters())
        muon = [group["params"] for group in param_groups(self.parts, self.optim) if group["kind"] == "muon"]
        return RankMemory(
            weights=gradients + n_bytes(self.parts.buffers()),
            gradients=gradients,
            optimizer=sum(
                OPTIMIZER_TENSORS[group["kind"]] * self.share(group["params"])
                for group in param_groups(self.parts, self.optim)
            ),
            forward=step.forward,
            backward=max(step.backward_divided, step.backward_blocks + 3 * self.block),
            backward_divided=step.backward_divided,
            backward_blocks=step.backward_blocks,
            # the update of the largest group of equal matrices exists divided and whole
            update=step.update + max((self.share(p) for p in by_shape(itertools.chain(*muon))), default=0),
            gathered=self.root + self.block,
        )
