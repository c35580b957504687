"""Plans a training run before it starts:  python scripts/plan.py model=small trainer=fsdp data.batch_size=16

Memory of one device by its parts, FLOPs, tokens, the time on this machine from a few timed steps, the largest
data.batch_size, and a projection to many GPUs with its assumptions. Nothing is written.

  python scripts/plan.py model=small data.batch_size=16               this machine, and DDP on many GPUs
  python scripts/plan.py model=gpt2 trainer=fsdp time=false           FSDP2, without timed steps
"""

import sys
from typing import TYPE_CHECKING

from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.entry import entry
from tril.scripts.cli.errors import user_errors
from tril.scripts.cli.typed import Typed
from tril.scripts.planning.plan_config import KEYS, PlanConfig, parse

if TYPE_CHECKING:
    from tril.model.gpt import GPT
    from tril.scripts.planning.rank_memory import RankModel

TIMED_FLOPS = 1e11  # of a timed pass on a CPU, which takes a second or two; or one window


@entry("plan")
def main(cfg: dict, typed: Typed) -> None:
    with user_errors():
        plan = parse(cfg)
        run = RunConfig.of({key: value for key, value in cfg.items() if key not in KEYS}, typed.without(*KEYS))
        run = run.with_likely_vocabulary().on_this_machine()
        from tril.scripts.planning.process_grid import grid_of

        grid = grid_of(run, run.devices)
    from tril.scripts.planning.projection import memory_hardware
    from tril.scripts.planning.rank_memory import RankModel

    assert run.hardware is not None
    here(run, plan, RankModel(run.model, run.optim, memory_hardware(run.hardware), grid))
    elsewhere(run, plan)


def here(run: RunConfig, plan: PlanConfig, rank: "RankModel") -> None:
    """Prints memory, work and time of the run on this machine."""
    import torch

    from tril.model.gpt import GPT
    from tril.scripts.planning import plan_text
    from tril.scripts.planning.step_memory import n_bytes

    with torch.device("meta"):
        model = GPT(run.model)
        cache = model.new_cache(1)
    print(f"{plan_text.heading(run, model, rank.grid)}\n", flush=True)
    memory = rank.memory(run.data.batch_size, run.accumulate)
    kv_cache = n_bytes([*cache.keys, *cache.values]) * rank.weight_bytes // 4
    print(plan_text.memory_table(memory, kv_cache, run.model.context_length))
    windows = print_room(run, rank)
    tokens = run.tokens_per_step() * rank.grid.world_size
    seconds = timed(run, model, windows) if plan.time and rank.grid.world_size == 1 else None
    print(f"\n{plan_text.run_table(tokens, tokens * model.flops_per_token(), run.steps, seconds)}", flush=True)


def print_room(run: RunConfig, rank: "RankModel") -> int | None:
    """Prints the largest data.batch_size that fits on one device of this machine, and returns it; None: unknown."""
    from tril.scripts.planning.plan_text import room
    from tril.scripts.planning.projection import batch_that_fits
    from tril.scripts.planning.step_memory import ALLOCATOR_FACTOR, available_bytes

    assert run.hardware is not None
    accelerator = run.hardware.accelerator
    if (budget := available_bytes(accelerator)) is None:
        return None
    if accelerator == "cpu":  # its processes share the memory
        budget //= max(1, rank.grid.world_size // run.trainer.num_nodes)
    factor = ALLOCATOR_FACTOR[accelerator]
    windows = batch_that_fits(rank, run.data.batch_size, run.accumulate, budget / factor)
    print(room(windows, budget, factor, accelerator))
    return windows


def timed(run: RunConfig, model: "GPT", windows: int | None) -> tuple[float, float] | None:
    """Seconds of one step and of the run without validation; None: a timed step would not fit."""
    from tril.model.training import run_estimate
    from tril.model.training.hardware import configure_torch

    assert run.hardware is not None
    size = run.data.batch_size
    if run.hardware.accelerator == "cpu":
        per_window = model.flops_per_token() * run.model.context_length
        size = max(1, min(size, int(TIMED_FLOPS / per_window)))
    if windows is not None and size > windows:
        print("not timed: no timed step fits into the memory of this machine", file=sys.stderr)
        return None
    configure_torch(run.hardware.accelerator)
    speed = run_estimate.measure(run.model, run.optim, size, run.hardware)
    per_step = run.data.batch_size * run.accumulate
    step = per_step * speed.train + speed.step
    return step, speed.run(steps=run.steps, windows_per_step=per_step, val_windows=0, validations=0)


def elsewhere(run: RunConfig, plan: PlanConfig) -> None:
    """Prints the projection to many GPUs."""
    from tril.scripts.planning.plan_text import assumptions, gpu_memory_table, gpu_time_table
    from tril.scripts.planning.projection import project

    projections, refused = [], []
    for world_size in plan.gpus:
        try:
            projections.append(project(run, plan, world_size))
        except ValueError as error:
            refused.append(f"{world_size:,} GPUs: {error}")
    print(f"\nOn {plan.gpu} GPUs (trainer={trainer_name(run)}), per GPU:")
    if projections:
        print(f"{gpu_memory_table(projections)}\n\n{gpu_time_table(projections, run.steps)}\n")
    print("\n".join([*refused, assumptions(run, plan) if projections else "no number of gpus= can run this model"]))


def trainer_name(run: RunConfig) -> str:
    """The choice of the group `trainer` with the strategy that many devices have."""
    return "fsdp" if run.trainer.strategy == "model_parallel" else "ddp"


if __name__ == "__main__":
    main()
