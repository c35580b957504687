"""Measures steps of sharded and copied GPTs, as one rank of `tests.ranks.run_ranks`. Rank 0 writes what it measured.

Argument: a JSON file with the cases: {name: [fields of GPTConfig, optimizer, whether FSDP2 shards it, windows]}.
"""

import bisect
import gc
import itertools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tril.model.gpt import GPT, GPTConfig
from tril.model.training.optim import MuonAdamW, OptimConfig, build_optimizer, local
from tril.model.training.parallel import shard

STEPS = 4


class Sent(TorchDispatchMode):
    """Adds up what a ring of the ranks of each collective operation would send."""

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, name = func(*args, **(kwargs or {})), str(func)
        if "c10d" in name:
            sizes = [x.nbytes for x in tree_iter(args) if isinstance(x, Tensor)]
            if "allgather_base" in name or "reduce_scatter" in name:  # output and input
                self.total += max(sizes) - min(sizes)
            elif "all_gather_into" in name:  # of the input, n
                self.total += (args[1] - 1) * sizes[0]
            elif "allreduce_" in name:  # DDP
                self.total += 2 * (dist.get_world_size() - 1) / dist.get_world_size() * sum(sizes)
        return out


class Loss(nn.Module):
    def __init__(self, model: GPT):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.nll(ids, ids).mean()


def build(config: GPTConfig, sharded: bool) -> tuple[GPT, nn.Module]:
    if not sharded:
        model = GPT(config)
        return model, DistributedDataParallel(Loss(model))
    with torch.device("meta"):
        model = GPT(config)
    shard(model, init_device_mesh("cpu", (dist.get_world_size(),)), torch.device("cpu"))
    return model, Loss(model)


def measure(fields: dict, kind: str, sharded: bool, windows: int) -> dict[str, float]:
    """The peak of the tensors' bytes in a step, and the bytes sent in it.

    Python's reference cycles, which live for a time that is chance, are collected before each step.
    """
    gc.collect()  # what the cases before left
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model, loss = build(GPTConfig(**fields), sharded)
        optimizer = build_optimizer(model, OptimConfig(kind=kind))
        ids = torch.randint(fields["vocab_size"], (windows, fields["context_length"]))
        for _ in range(STEPS):
            gc.collect()
            with Sent() as sent, record_function("step"):
                value = loss(ids)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
    return {"peak": lowest_peak(prof, held_bytes(model, optimizer, copies=1 if sharded else 2)), "sent": sent.total}


def lowest_peak(prof: profile, held: int) -> int:
    """The largest sum of allocated bytes in a step: the lowest of the steps after the first, which creates the
    optimizer's state. The profiler does not see what gloo's threads free, which can only add to it.

    Args:
        held: bytes of weights, gradients and optimizer state, with which a step begins.
    """
    events = sorted(prof.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    memory = [event for event in events if event.name() == "[memory]"]
    totals = list(itertools.accumulate(event.nbytes() for event in memory))
    starts = [event.start_ns() for event in memory]
    added = []
    for step in [event for event in events if event.name() == "step"][1:]:
        begin, end = bisect.bisect_left(starts, step.start_ns()), bisect.bisect_right(starts, step.end_ns())
        added.append(max(totals[begin:end]) - totals[begin - 1])
    return held + min(added)


def held_bytes(model: GPT, optimizer: MuonAdamW, copies: int) -> int:
    """What this rank has of weights, buffers, optimizer state and gradients, with so many copies of the gradients."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = [tensor for of_one in optimizer.state.values() for tensor in of_one.values()]
    tensors = [*model.parameters(), *model.buffers(), *state, *gradients * copies]
    return sum(local(tensor.detach()).nbytes for tensor in tensors)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    path = Path(sys.argv[1])
    measured = {name: measure(*case) for name, case in json.loads(path.read_text()).items()}
    if dist.get_rank() == 0:
        path.with_suffix(".measured").write_text(json.dumps(measured))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
