"""Memory of a training step, measured on tensors without content, so that it needs neither the memory nor the time."""

import contextlib
import itertools
import re
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tril.model.autocast import AUTOCAST
from tril.model.gpt import GPT, GPTConfig
from tril.model.training.hardware import Hardware
from tril.model.training.optim import OptimConfig, build_optimizer

# Memory of a process relative to the bytes of its tensors. glibc's heap is fragmented: 1.6 to 2.3, measured on Linux
# for three models and batches of 2 to 32 windows. For CUDA's caching allocator it is an allowance.
ALLOCATOR_FACTOR = {"cpu": 2.0, "cuda": 1.1}


@dataclass(frozen=True)
class StepMemory:
    """Bytes of the tensors of a training step that is not compiled.

    Args:
        weights, gradients, optimizer: of the whole model, buffers included in the weights.
        forward: what the forward pass adds to these three at its peak; Lightning frees the gradients of the last step
            after it.
        backward: what the backward pass adds to weights and optimizer at its peak, with its gradients.
        backward_divided: the same without gradients of parameters in blocks, and without those of an earlier
            micro-batch.
        backward_blocks: the same from the first gradient of a parameter in a block on.
        update: temporary tensors at the peak of the optimizer's step.
    """

    weights: int
    gradients: int
    optimizer: int
    forward: int
    backward: int
    backward_divided: int
    backward_blocks: int
    update: int

    @property
    def forward_peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.forward

    @property
    def backward_peak(self) -> int:
        return self.weights + self.optimizer + self.backward

    @property
    def update_peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.update

    @property
    def passes(self) -> int:
        """Peak of forward and backward pass."""
        return max(self.forward_peak, self.backward_peak)

    @property
    def peak(self) -> int:
        """Peak of the step."""
        return max(self.passes, self.update_peak)


class StorageEvents(TorchDispatchMode):
    """Lists when each storage is created and freed: (its number, its bytes; negative if freed)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    def number(self, tensor: Tensor) -> int:
        """Of the tensor's storage, which is new if it was not seen before."""
        storage = tensor.untyped_storage()
        if storage not in self._numbers:
            number, size = len(self.events), storage.nbytes()  # of its first event
            self._numbers[storage] = number
            self.events.append((number, size))
            weakref.finalize(storage, self.events.append, (number, -size))
        return self._numbers[storage]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self.number(leaf)
        return out

    def peak(self, start: int, end: int, without: Collection[int] = ()) -> int:
        """The most bytes between two lengths of the list; storages `without` are not counted."""
        sizes = [0 if number in without else size for number, size in self.events[:end]]
        return max(list(itertools.accumulate(sizes))[start - 1 :])


def step_memory(
    config: GPTConfig, optim: OptimConfig, batch_size: int, hardware: Hardware, *, accumulate: bool = False
) -> StepMemory:
    """The memory of a step after the first, which creates the optimizer's state.

    Args:
        accumulate: the gradients of an earlier micro-batch are kept.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    autocast = {"dtype": AUTOCAST.get(hardware.precision), "enabled": hardware.precision in AUTOCAST}
    with FakeTensorMode(), StorageEvents() as storages, torch.random.fork_rng([]):
        weights = torch.bfloat16 if hardware.precision == "bf16-true" else torch.float32
        with torch.device(hardware.accelerator), default_dtype(weights):
            model = GPT(config)
            ids = torch.randint(config.vocab_size, (batch_size, config.context_length))
        optimizer = build_optimizer(model, optim, hardware.precision)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        marks = [len(storages.events)]
        with torch.autocast(hardware.accelerator, **autocast):
            loss = model.nll(ids, ids).mean()
        marks.append(len(storages.events))
        if not accumulate:
            optimizer.zero_grad()  # Lightning does it after the forward pass
        marks.append(len(storages.events))
        loss.backward()
        marks.append(len(storages.events))
        in_blocks = {storages.number(p.grad) for p in model.blocks.parameters() if p.grad is not None}
        optimizer.step()
        marks.append(len(storages.events))
    state = (tensor for of_one in optimizer.state.values() for tensor in of_one.values())
    gradients = n_bytes(p.grad for p in model.parameters())
    held = [n_bytes([*model.parameters(), *model.buffers()]), gradients, n_bytes(state)]
    kept = held[0] + held[2]
    first = max(marks[2], 1 + min(in_blocks))  # an event in which a gradient in a block exists
    outside = gradients - n_bytes(p.grad for p in model.blocks.parameters()) if accumulate else 0
    return StepMemory(
        *held,
        forward=storages.peak(marks[0], marks[1]) - sum(held),
        backward=storages.peak(marks[2], marks[3]) - kept,
        backward_divided=storages.peak(marks[2], marks[3], without=in_blocks) - kept - outside,
        backward_blocks=storages.peak(first, marks[3], without=in_blocks) - kept - outside,
        update=storages.peak(marks[3], marks[4]) - sum(held),
    )


def n_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors; None counts as nothing."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def step_bytes(
    config: GPTConfig, optim: OptimConfig, batch_size: int, hardware: Hardware, *, accumulate: bool = False
) -> int:
    """Peak bytes of all tensors in a step, see `step_memory`."""
    return step_memory(config, optim, batch_size, hardware, accumulate=accumulate).peak


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Creates the modules of the block with weights of this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def largest_batch(needed: tuple[float, float], batch_size: int, budget: float) -> int:
    """The most windows that fit into `budget` bytes; may be less than 1.

    Args:
        needed: bytes with `batch_size` windows, and with twice as many; in between they are linear.
    """
    per_window = (needed[1] - needed[0]) / batch_size
    return int(batch_size + (budget - needed[0]) // per_window)


def available_bytes(accelerator: str) -> int | None:
    """Bytes that new tensors of this process can take on the device; None: unknown."""
    if accelerator == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return free + torch.cuda.memory_reserved()
    status = Path("/proc/self/status")
    if accelerator != "cpu" or not status.is_file():
        return None
    import resource

    meminfo = Path("/proc/meminfo").read_text()
    available = kilobytes("MemAvailable", meminfo)
    if available is not None and (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        available = min(available, limit - (kilobytes("VmSize", status.read_text()) or 0))
    return available


def kilobytes(name: str, text: str) -> int | None:
    """Bytes of a line `name: N kB` of a file in /proc."""
    match = re.search(rf"^{name}:\s*(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
