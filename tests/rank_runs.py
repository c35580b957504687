"""Runs train.py in every process of `tests.ranks.run_ranks`, one run after the other.

Argument: a JSON file with a list of [overrides, whether the run ends at its first validation]. Overrides that start
with resume= continue a run. Rank 0 adds a file .../RUN.reductions: how often gradients were sent.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.runs import in_process, interrupted, train_typed, typed
from tril.scripts.cli.process import process_rank, quiet_ranks


def run(overrides: list[str], ends_early: bool) -> None:
    if overrides[0].startswith("resume="):
        done = in_process(*overrides, cwd=Path.cwd())
        assert done.returncode == 0, done.stderr
    elif ends_early:
        with interrupted():
            train_typed(typed(*overrides))
    else:
        train_typed(typed(*overrides))


def count_reductions() -> Counter:
    """Counts from now on how often gradients are sent, for each bucket of DDP and each group of FSDP2."""
    counts: Counter = Counter()
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"  # torch 2.13
    init, reduce_scatter = DistributedDataParallel.__init__, getattr(dist, name)

    def hook(state, bucket):
        counts["ddp"] += 1
        return allreduce_hook(dist.group.WORLD, bucket)

    def counting_init(self, *arguments, **options):
        init(self, *arguments, **options)
        self.register_comm_hook(None, hook)

    def counting_reduce_scatter(*arguments, **options):
        counts["fsdp"] += 1
        return reduce_scatter(*arguments, **options)

    DistributedDataParallel.__init__ = counting_init
    setattr(dist, name, counting_reduce_scatter)
    return counts


def main() -> None:
    quiet_ranks()
    counts = count_reductions()
    for overrides, ends_early in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        counts.clear()
        run(overrides, ends_early)
        folders = [text.partition("=")[2] for text in overrides if text.startswith("hydra.run.dir=")]
        if folders and process_rank() == 0:
            Path(f"{folders[0]}.reductions").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
