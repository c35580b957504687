"""what=attention: time and memory of each backend alone, forward and backward, against the sequence length."""

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from tril.model.attention import BACKENDS, attention
from tril.model.autocast import AUTOCAST
from tril.scripts.benchmarks.machine import total_memory
from tril.scripts.benchmarks.section import Bench, Lines, Plot, Samples, Section
from tril.scripts.benchmarks.timing import interleaved, step_seconds, steps_within

DTYPES = AUTOCAST | {"bf16-true": torch.bfloat16, "32-true": torch.float32}  # of q, k and v by precision
HEADS, HEAD_SIZE = 4, 64
SHORTEST = 64
LONGEST = {"cpu": 2048, "mps": 4096, "cuda": 16384}
REPETITION_SECONDS = 0.05  # of all calls in one repetition; much longer than the resolution of the clock
MEMORY_SHARE = 1 / 4  # of the device's memory that one call may use


def run(bench: Bench) -> Iterator[Section]:
    device, dtype = bench.device, DTYPES[bench.hardware.precision]
    lengths = [SHORTEST << n for n in range(20) if SHORTEST << n <= LONGEST[device]]
    total = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else total_memory()
    limit = MEMORY_SHARE * (total or math.inf) / 1e6
    memory: dict[str, dict[int, float]] = {name: {} for name in BACKENDS if name != "flex" or device == "cuda"}
    times: dict[tuple[str, int], list[float]] = {}
    for length in lengths:
        tasks = {}
        for name, sizes in memory.items():
            # Memory grows at most quadratically. If half the length was left out, this one is, too.
            if length > SHORTEST and 4 * sizes.get(length // 2, math.inf) > limit:
                continue
            step = call(name, length, dtype, device)
            step()  # warm-up; on CUDA, flex is compiled here
            sizes[length] = peak_memory(step, device) / 1e6
            calls = steps_within(REPETITION_SECONDS, step_seconds(step, device)[0], bench.config.steps)
            tasks[name, length] = partial(seconds_per_call, step, calls, device)
        times |= interleaved(tasks, bench.config.repeats, f"attention, length {length} of {lengths[-1]}")
    milliseconds = {name: {n: 1e3 * statistics.median(times[name, n]) for n in sizes} for name, sizes in memory.items()}
    samples = {f"{name}, length {n} (s)": values for (name, n), values in times.items()}
    notes = [
        f"Forward and backward of one causal sequence, {HEADS} heads of size {HEAD_SIZE}, {dtype}; no projections.",
        f"The median of {bench.config.repeats} repetitions in alternating order, each of 1 to {bench.config.steps} "
        f"(steps) calls that take {REPETITION_SECONDS * 1e3:.0f} ms together.",
    ]
    if left_out := [f"{name} from {2 * max(sizes)}" for name, sizes in memory.items() if max(sizes) < lengths[-1]]:
        notes.append(f"Left out, over {MEMORY_SHARE:.0%} of the memory: {', '.join(left_out)}.")
    yield section("Time of attention against length", "ms", milliseconds, samples, notes)
    if device != "mps":
        counter = "CUDA allocator" if device == "cuda" else "profiler"
        held = "The largest sum of tensors that a call creates and holds at a time, with gradients, without q, k and v"
        note = f"{held}; counted by torch's {counter}."
        yield section("Memory of attention against length", "MB", memory, {}, [note])


def call(backend: str, length: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Returns a function that runs forward and backward of one causal sequence."""
    shape = (1, HEADS, length, HEAD_SIZE)  # (B, H, T, D)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, dtype=dtype, device=device)
    return lambda: torch.autograd.grad(attention(q, k, v, causal=True, backend=backend), (q, k, v), upstream)


def seconds_per_call(step: Callable[[], object], calls: int, device: str) -> float:
    return step_seconds(lambda: [step() for _ in range(calls)], device)[0] / calls


def peak_memory(step: Callable[[], object], device: str) -> float:
    """The largest sum of bytes of all tensors that one call holds at a time; NaN where torch does not count it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    if device != "cpu":
        return math.nan
    # The resident size of the process does not tell: the allocator keeps freed memory.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above every level that torch's profiler prints
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    changes = (event.nbytes() for event in events)  # pyright: ignore[reportAttributeAccessIssue] missing in its stubs
    return max(itertools.accumulate(changes, initial=0))


def section(title: str, unit: str, figures: Lines, samples: Samples, notes: list[str]) -> Section:
    """A row for each length; the guides go through the largest and the smallest value at the greatest length."""
    lengths = list(max(figures.values(), key=len))
    rows = [{"length": n} | {f"{name} ({unit})": line.get(n) for name, line in figures.items()} for n in lengths]
    last = [line[lengths[-1]] for line in figures.values() if lengths[-1] in line]
    guides = {
        "O(T²)": {n: max(last) * (n / lengths[-1]) ** 2 for n in lengths},
        "O(T)": {n: min(last) * n / lengths[-1] for n in lengths},
    }
    return Section("attention", title, rows, samples, notes, Plot(figures, "length T (tokens)", unit, guides, log=True))
