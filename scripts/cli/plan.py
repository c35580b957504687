"""What a run costs, before it starts:  python train.py plan=true model=small trainer=fsdp data.batch_size=16

The memory of a step is counted, on tensors without content. What P GPUs need of it is calculated, for the GPU of
`GPU_NAME` and the assumptions beside it; W, G and S are the bytes of all weights, gradients and optimizer states:

    DDP     memory W + 2 G + S + activations (its buckets copy the gradients), sent per step 2 (P - 1) / P G
    FSDP2   memory (W + G + S) / P + activations + the weights and gradients of one block, and of what is outside of the
            blocks; sent per step (P - 1) / P (2 A W + G) with A micro-batches

What a ring sends: Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002; FSDP: Zhao et al. 2023,
https://arxiv.org/abs/2304.11277, section 3. With FSDP2, Muon gathers its matrices once more: (P - 1) / P of them.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tril.model.autocast import AUTOCAST
from tril.model.formats import clock, engineering, plain_table, plural
from tril.model.gpt import GPT
from tril.model.training import run_estimate
from tril.model.training.hardware import peak_flops
from tril.model.training.optim import build_optimizer, param_groups
from tril.scripts.cli.config import RunConfig

GPU_NAME, GPU_PRECISION, GPUS = "H100", "bf16-mixed", (1, 8, 64)
MFU = 0.4  # assumed share of the GPU's peak FLOP/s; small models and batches stay below it
LINK = 50e9  # bytes per second that a GPU sends: 400 Gbit/s (NVIDIA DGX H100 data sheet)
TIMED_FLOPS = 1e11  # of a timed pass on a CPU, a second or two; at least one window


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations create and that still exist: `now`, and `peak` at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._counted: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()) not in self._counted:
                self._counted.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)


def step_memory(config: RunConfig, batch_size: int, precision: str) -> dict[str, int]:
    """Bytes at the peak of a step with micro-batches of `batch_size` windows, by what they are; nothing is compiled.

    What is neither weights, gradients nor optimizer state is "activations".
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    shape, before = (batch_size, config.model.context_length), torch.get_default_dtype()
    with FakeTensorMode(), LiveBytes() as memory, torch.random.fork_rng([]):
        torch.set_default_dtype(torch.bfloat16 if precision == "bf16-true" else torch.float32)
        model = GPT(config.model)
        torch.set_default_dtype(before)
        ids = torch.randint(config.model.vocab_size, shape)
        optimizer = build_optimizer(model, config.optim, precision)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        memory.peak = memory.now
        with torch.autocast("cpu", dtype=AUTOCAST.get(precision), enabled=precision in AUTOCAST):
            loss = model.nll(ids, ids).mean()
        if config.accumulate == 1:
            optimizer.zero_grad()  # Lightning does it after the forward pass
        loss.backward()
        optimizer.step()
    states = (tensor for state in optimizer.state.values() for tensor in state.values())
    gradients = n_bytes(p.grad for p in model.parameters())
    held = {"weights": n_bytes([*model.parameters(), *model.buffers()]), "gradients": gradients}
    held["optimizer"] = n_bytes(states)
    return held | {"activations": memory.peak - sum(held.values())}


def n_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors; None counts as nothing."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def print_plan(config: RunConfig) -> None:
    """Prints the cost of a run on this machine, timed, and on GPUs, calculated."""
    config = config.fitted(config.likely_vocabulary()).on_this_machine()
    assert config.hardware is not None
    hardware, size, steps = config.hardware, config.data.batch_size, config.steps
    with torch.device("meta"):
        model = GPT(config.model)
    tokens = config.tokens_per_step()
    memory = step_memory(config, size, hardware.precision)
    window = (sum(step_memory(config, 2 * size, hardware.precision).values()) - sum(memory.values())) / size
    flops = model.flops_per_token(config.window_lengths)
    cost = f"{engineering(flops)}FLOP per token"
    print(f"{model.n_parameters():,} parameters, vocabulary {config.model.vocab_size:,}, {cost}")
    print(f"{plural(steps, 'step')} of {config.accumulate} x {size} windows of {config.model.context_length:,} tokens")
    parts = ", ".join(f"{name} {engineering(value)}B" for name, value in memory.items())
    total, more = (f"{engineering(size)}B" for size in (sum(memory.values()), window))
    print(f"memory of a step: {total} ({parts}); {more} for each further window")
    print(f"{engineering(tokens * steps)} tokens, {tokens * steps * flops:.3g} FLOPs; ", end="")
    print(f"about {clock(seconds_here(config, model))} on {hardware.device_name}, without validations\n")
    assumed = f"{GPU_NAME}, {GPU_PRECISION}, {MFU:.0%} of its peak, {LINK / 1e9:g} GB/s sent, nothing overlaps"
    header = ["GPUs", "memory", "tokens per step", "sent per step", "step", "run"]
    on_gpus = memory if hardware.precision == GPU_PRECISION else step_memory(config, size, GPU_PRECISION)
    print(f"On GPUs, per GPU ({assumed}):\n{plain_table([header, *gpu_rows(config, model, on_gpus)])}")


def seconds_here(config: RunConfig, model: GPT) -> float:
    """Seconds of the run on this machine, from a few timed steps."""
    assert config.hardware is not None
    size = config.data.batch_size
    if config.hardware.accelerator == "cpu":
        size = max(1, min(size, int(TIMED_FLOPS / model.flops_per_token() / config.model.context_length)))
    timed = size * config.model.context_length
    [speed] = run_estimate.measure([config.model], config.window_lengths, config.optim, timed, config.hardware)
    return speed.run(steps=config.steps, tokens_per_step=config.tokens_per_step(), val_tokens=0, validations=0)


def gpu_rows(config: RunConfig, model: GPT, memory: dict[str, int]) -> list[list[str]]:
    """One row for each number of GPUs, by the formulas at the head of this file, from `step_memory`."""
    peak, rows = peak_flops(GPU_NAME), []
    assert peak is not None
    held, gradients = sum(memory.values()) - memory["activations"], memory["gradients"]
    block = n_bytes(model.blocks[0].parameters())
    gathered = 2 * (gradients - (config.model.n_layers - 1) * block)  # a block and what is outside of the blocks
    groups = param_groups(model, config.optim)
    muon = sum(n_bytes(group["params"]) for group in groups if group["kind"] == "muon")
    tokens = config.tokens_per_step()
    for gpus in GPUS:
        ring = (gpus - 1) / gpus
        if config.trainer.strategy == "model_parallel" and gpus > 1:
            needed = held // gpus + memory["activations"] + gathered
            sent = ring * ((2 * config.accumulate + 1) * gradients + muon)
        else:
            needed = held + memory["activations"] + (gradients if gpus > 1 else 0)
            sent = 2 * ring * gradients
        step = tokens * model.flops_per_token(config.window_lengths, masked=True) / (peak * MFU) + sent / LINK
        sizes = [f"{engineering(needed)}B", f"{tokens * gpus:,}", f"{engineering(sent)}B"]
        rows.append([str(gpus), *sizes, f"{1000 * step:.3g} ms", clock(step * config.steps)])
    return rows
