"""The tables of scripts/plan.py."""

from collections.abc import Sequence

from tril.model.gpt import GPT
from tril.scripts.cli.config import RunConfig
from tril.scripts.cli.formats import clock, engineering, plain_table, plural
from tril.scripts.planning.plan_config import PlanConfig
from tril.scripts.planning.process_grid import ProcessGrid
from tril.scripts.planning.projection import Projection, gpu_hardware
from tril.scripts.planning.rank_memory import RankMemory


def size(n_bytes: float) -> str:
    """2500000 -> "2.5 MB"."""
    text = engineering(n_bytes)
    return f"{text}B" if " " in text else f"{text} B"


def heading(run: RunConfig, model: GPT, grid: ProcessGrid) -> str:
    """The model, and what a step is."""
    assert run.hardware is not None
    return (
        f"{model.n_parameters():,} parameters, vocabulary {run.model.vocab_size:,}, "
        f"{engineering(model.flops_per_token())}FLOP per token\n"
        f"{plural(grid.world_size, 'device')}, {run.accumulate} x {run.data.batch_size} windows of "
        f"{run.model.context_length:,} tokens per step, {run.hardware.precision} on {run.hardware.device_name}"
    )


def room(windows: int, budget: float, factor: float, accelerator: str) -> str:
    """The largest batch that fits on this machine."""
    fits = f"largest data.batch_size here: {windows:,}" if windows else "not even one window fits here"
    free = f"{size(budget)} are free"
    if accelerator == "cpu":
        return f"{fits} ({free}; a process takes about {factor:g} times the peak, because its heap is fragmented)"
    return f"{fits} ({free}, and the allocator takes {factor - 1:.0%})"


def memory_table(memory: RankMemory, kv_cache: int, length: int) -> str:
    """The parts of a step's memory, and what of them exists at each of its two peaks."""
    w, g, o = memory.weights, memory.gradients, memory.optimizer
    held = [
        ("weights and tables", w, w, w, w),
        ("gradients", g, g, None, g),
        ("optimizer state", o, o, o, o),
        ("gathered weights", None, memory.gathered, memory.gathered, None),
        ("gradients in DDP's buckets", None, *[memory.buckets] * 3),
        ("activations, temporary, new gradients", None, memory.forward, memory.backward, memory.update),
        ("peak", None, memory.forward_peak, memory.backward_peak, memory.update_peak),
    ]
    rows = [[name, *("" if n is None else size(n) for n in values)] for name, *values in held if any(values)]
    cache = [f"KV cache of sampling, {length:,} tokens", size(kv_cache), "", "", ""]
    return plain_table([["memory of one device", "whole", "forward", "backward", "optimizer step"], *rows, cache])


def run_table(tokens: int, flops: float, steps: int, seconds: tuple[float, float] | None) -> str:
    """Tokens and FLOPs of one step and of the run.

    Args:
        tokens, flops: of one step, on all devices.
        seconds: of one step and of the run; None: not timed.
    """
    rows = [
        ["", "one step", f"{steps:,} steps"],
        ["tokens", f"{tokens:,}", engineering(tokens * steps)],
        ["FLOPs", f"{flops:.3g}", f"{flops * steps:.3g}"],
    ]
    if seconds is not None:
        rows.append(["time", duration(seconds[0]), duration(seconds[1])])
    return plain_table(rows)


def gpu_memory_table(projections: Sequence[Projection]) -> str:
    """Memory per GPU; one line for each number of GPUs."""
    names = ["weights", "gradients", "optimizer", "gathered", "activations", "update", "peak", "largest batch_size"]
    lines = [["GPUs", *names]]
    for found in projections:
        of = found.memory
        parts = (of.weights, of.gradients, of.optimizer, of.gathered + of.buckets, of.backward, of.update, of.peak)
        lines.append([f"{found.world_size:,}", *map(size, parts), f"{found.largest_batch:,}"])
    return plain_table(lines, text_columns=())


def gpu_time_table(projections: Sequence[Projection], steps: int) -> str:
    """Tokens, communication and time; one line for each number of GPUs."""
    names = ["tokens per step", "of the run", "sent per step", "computing", "sending", "longer", "time of the run"]
    lines = [["GPUs", *names]]
    for found in projections:
        longer = "computing" if found.compute >= found.communication else largest(found.sent)
        tokens = [f"{found.tokens:,}", engineering(found.tokens * steps)]
        times = [duration(found.compute), duration(found.communication), longer, duration(found.seconds * steps)]
        lines.append([f"{found.world_size:,}", *tokens, size(sum(found.sent.values())), *times])
    return plain_table(lines, text_columns=(6,))


def largest(sent: dict[str, float]) -> str:
    """What most of the sent bytes are."""
    return f"sending {max(sent, key=lambda name: sent[name])}"


def duration(seconds: float) -> str:
    """0.0123 -> "12.3 ms", 42 -> "42 s", from a minute on as `clock`."""
    if seconds >= 60:
        return clock(seconds)
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def assumptions(run: RunConfig, plan: PlanConfig) -> str:
    """What the projection to many GPUs takes for granted."""
    hardware = gpu_hardware(run, plan.gpu)
    assert hardware.peak_flops is not None
    kernels = (
        "this machine's CPU kernels, which keep more than a GPU's" if hardware.accelerator == "cpu" else "this GPU"
    )
    lines = [
        f"mfu={plan.mfu:g} of {hardware.peak_flops / 1e12:,.0f} TFLOP/s (gpu={plan.gpu}, dense 16-bit), in "
        f"{hardware.precision}; small models and batches stay below it",
        f"link={plan.link:g} GB/s sent per GPU, without latency; nothing is sent while a GPU computes",
        f"data.batch_size={run.data.batch_size} on each data rank and trainer.max_steps={run.steps:,}, so more GPUs "
        "train on more tokens",
        f"memory without torch.compile, with the activations of {kernels}",
        f"the largest batch_size fills gpu_memory={plan.gpu_memory:g} GB and leaves a tenth to the allocator",
        "time without validation, checkpoints and loading of data",
    ]
    if run.data.document_mask:
        lines.append("without the masks of data.document_mask")
    return "\n".join(["Assumptions:", *(f"- {line}" for line in lines)])
