"""what=attention: every backend by itself, forward and backward, against the length of the sequence."""

import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from tril.model.attention import attention
from tril.model.backends import BACKENDS
from tril.model.training.attention_kernels import DTYPES
from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import interleaved, seconds

HEADS, HEAD_SIZE = 4, 64
SHORTEST = 64
LONGEST = {"cpu": 2048, "mps": 4096, "cuda": 16384}
REPETITION = 0.05  # seconds that the calls of one repetition take together, so that the clock is fine enough
SHARE = 1 / 4  # of the memory, that one call may take
QUIET = "6"  # above every level that torch's profiler prints

Figures = dict[str, dict[int, float]]  # of each backend and length


def run(bench: Bench) -> list[Section]:
    lengths = [SHORTEST << n for n in range(20) if SHORTEST << n <= LONGEST[bench.device]]
    dtype = DTYPES[bench.plan.hardware.precision]
    backends = [name for name in BACKENDS if name != "flex" or bench.device == "cuda"]
    limit = SHARE * memory_of(bench.device)
    memory: Figures = {name: {} for name in backends}
    samples: dict[str, list[float]] = {}
    for length in lengths:
        tasks = {}
        for name in backends:
            if not expected(memory[name], length) > limit:  # also where it is not known
                step = call(name, length, dtype, bench.device)
                step()  # warm; on CUDA "flex" is compiled here
                memory[name][length] = peak(step, bench.device)
                calls = max(1, min(bench.steps, round(REPETITION / seconds(step, bench.device))))
                tasks[name] = partial(repetition, step, calls, bench.device)
        samples |= {
            f"{name}, length {length} (s)": values for name, values in interleaved(tasks, bench.repeats).items()
        }
        print(f"attention: length {length} of {lengths[-1]}", file=sys.stderr, flush=True)
    times = {
        name: {n: statistics.median(samples[f"{name}, length {n} (s)"]) * 1e3 for n in memory[name]}
        for name in backends
    }
    return sections(
        times,
        {name: {n: x / 1e6 for n, x in row.items()} for name, row in memory.items()},
        samples,
        lengths,
        dtype,
        bench,
    )


def call(backend: str, length: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Forward and backward of one causal sequence."""
    q, k, v = (
        torch.randn(1, HEADS, length, HEAD_SIZE, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
    )
    upstream = torch.randn(1, HEADS, length, HEAD_SIZE, dtype=dtype, device=device)
    return lambda: torch.autograd.grad(attention(q, k, v, causal=True, backend=backend), (q, k, v), upstream)


def repetition(step: Callable[[], object], calls: int, device: str) -> float:
    """Seconds of one call."""
    return seconds(lambda: [step() for _ in range(calls)], device) / calls


def peak(step: Callable[[], object], device: str) -> float:
    """The most bytes that the tensors made by one call take at the same time."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    if device != "cpu":
        return math.nan  # torch counts no peak there
    # The resident size of the process would tell nothing: the C library keeps what is freed.
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def expected(memory: Mapping[int, float], length: int) -> float:
    """Bytes that this length will take if memory grows with its square; infinite where the length before was left out."""
    if length == SHORTEST:
        return 0.0
    return 4 * memory[length // 2] if length // 2 in memory else math.inf


def memory_of(device: str) -> float:
    """Bytes in all."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return 8e9


def sections(
    times: Figures, memory: Figures, samples, lengths: Sequence[int], dtype: torch.dtype, bench: Bench
) -> list[Section]:
    size = f"one sequence, {HEADS} heads of {HEAD_SIZE}, {str(dtype).removeprefix('torch.')}"
    left_out = [
        f"{name} from {n} on" for name in times if (n := next((n for n in lengths if n not in times[name]), None))
    ]
    timed = [
        f"Forward and backward of {size}, causal, without the projections.",
        f"The median of {bench.repeats} repetitions, backends in turn; in each as many calls as take {REPETITION * 1e3:.0f} ms, "
        f"1 to {bench.steps} (steps).",
    ]
    measured = [
        "The largest sum of all tensors that one call makes and holds at the same time, gradients included, q, k and v not; "
        + ("counted by torch's CUDA allocator." if bench.device == "cuda" else "counted by torch's profiler.")
    ]
    if left_out:
        timed.append(f"Left out, since they would take more than {SHARE:.0%} of the memory: {', '.join(left_out)}.")
    parts = [section("Time of attention against length", "ms", times, samples, lengths, timed)]
    if bench.device != "mps":
        parts.append(section("Memory of attention against length", "MB", memory, {}, lengths, measured))
    return parts


def section(title: str, unit: str, figures: Figures, samples, lengths: Sequence[int], notes: Sequence[str]) -> Section:
    rows = [{"length": n} | {f"{name} ({unit})": figures[name].get(n) for name in figures} for n in lengths]
    return Section("attention", title, rows, samples, notes, draw=lambda axes: draw(axes, title, unit, figures))


def draw(axes, title: str, unit: str, figures: Figures) -> None:
    """Both axes logarithmic, so that a power is a straight line; the guides have the slopes of O(T) and O(T^2)."""
    for name, row in figures.items():
        axes.loglog(list(row), list(row.values()), "o-", ms=4, lw=1.3, label=name)
    lengths = sorted({n for row in figures.values() for n in row})
    last = [row[lengths[-1]] for row in figures.values() if lengths[-1] in row]
    for power, style, end in ((1, ":", min(last)), (2, "--", max(last))):
        label = "O(T)" if power == 1 else "O(T²)"
        axes.plot(
            lengths,
            [end * (n / lengths[-1]) ** power for n in lengths],
            style,
            color="0.5",
            lw=1,
            label=label,
            zorder=0,
        )
    axes.set(title=title, xlabel="length T (tokens)", ylabel=unit)
    axes.set_xticks(lengths, list(map(str, lengths)), fontsize=8)
    axes.minorticks_off()
    axes.legend(fontsize=8)
