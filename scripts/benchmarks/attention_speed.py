"""what=attention: time and memory of each backend alone, forward and backward, against the sequence length."""

import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from tril.model.attention import BACKENDS, attention
from tril.model.training.attention_kernels import DTYPES
from tril.scripts.benchmarks.bench_plot import Lines, Plot
from tril.scripts.benchmarks.memory import total_memory
from tril.scripts.benchmarks.section import Bench, Samples, Section
from tril.scripts.benchmarks.timing import interleaved, seconds

HEADS, HEAD_SIZE = 4, 64
SHORTEST = 64
LONGEST = {"cpu": 2048, "mps": 4096, "cuda": 16384}
REPETITION_SECONDS = 0.05  # of all calls in one repetition; much longer than the resolution of the clock
MEMORY_SHARE = 1 / 4  # of the device's memory that one call may use
ASSUMED_MEMORY = 8e9  # bytes, if the system does not say


def run(bench: Bench) -> list[Section]:
    lengths = [SHORTEST << n for n in range(20) if SHORTEST << n <= LONGEST[bench.device]]
    backends = [name for name in BACKENDS if name != "flex" or bench.device == "cuda"]
    limit = MEMORY_SHARE * device_memory(bench.device)
    memory: dict[str, dict[int, float]] = {name: {} for name in backends}
    times: dict[tuple[str, int], list[float]] = {}
    for length in lengths:
        tasks = {}
        for name in backends:
            if expected_memory(memory[name], length) > limit:
                continue
            step = call(name, length, DTYPES[bench.hardware.precision], bench.device)
            step()  # warm-up; on CUDA, flex is compiled here
            memory[name][length] = peak_memory(step, bench.device) / 1e6
            calls = max(1, min(bench.config.steps, round(REPETITION_SECONDS / seconds(step, bench.device))))
            tasks[name, length] = partial(seconds_per_call, step, calls, bench.device)
        times |= interleaved(tasks, bench.config.repeats)
        print(f"attention: length {length} of {lengths[-1]}", file=sys.stderr, flush=True)
    milliseconds = {name: {n: 1e3 * statistics.median(times[name, n]) for n in row} for name, row in memory.items()}
    samples = {f"{name}, length {n} (s)": values for (name, n), values in times.items()}
    left_out = [f"{name} from {2 * max(row)}" for name, row in memory.items() if max(row) < lengths[-1]]
    time, size = "Time of attention against length", "Memory of attention against length"
    sections = [section(time, "ms", milliseconds, samples, time_notes(bench, left_out))]
    if bench.device != "mps":
        sections.append(section(size, "MB", memory, {}, [memory_note(bench)]))
    return sections


def call(backend: str, length: int, dtype: torch.dtype, device: str) -> Callable[[], object]:
    """Returns a function that runs forward and backward of one causal sequence."""
    shape = (1, HEADS, length, HEAD_SIZE)  # (B, H, T, D)
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, dtype=dtype, device=device)
    return lambda: torch.autograd.grad(attention(q, k, v, causal=True, backend=backend), (q, k, v), upstream)


def seconds_per_call(step: Callable[[], object], calls: int, device: str) -> float:
    return seconds(lambda: [step() for _ in range(calls)], device) / calls


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
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue] missing in torch's stubs
        highest = max(highest, level)
    return highest


def expected_memory(memory: Mapping[int, float], length: int) -> float:
    """MB at this length if memory grows quadratically; infinite if half the length was left out."""
    return 0.0 if length == SHORTEST else 4 * memory.get(length // 2, math.inf)


def device_memory(device: str) -> float:
    """MB in total."""
    size = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else total_memory()
    return (size or ASSUMED_MEMORY) / 1e6


def time_notes(bench: Bench, left_out: Sequence[str]) -> list[str]:
    dtype = str(DTYPES[bench.hardware.precision]).removeprefix("torch.")
    notes = [
        f"Forward and backward of one sequence, {HEADS} heads of size {HEAD_SIZE}, {dtype}, causal, no projections.",
        f"The median of {bench.config.repeats} repetitions, backends in alternating order; each repetition runs as "
        f"many calls as take {REPETITION_SECONDS * 1e3:.0f} ms, 1 to {bench.config.steps} (steps).",
    ]
    if left_out:
        notes.append(f"Left out, over {MEMORY_SHARE:.0%} of the memory: {', '.join(left_out)}.")
    return notes


def memory_note(bench: Bench) -> str:
    counter = "CUDA allocator" if bench.device == "cuda" else "profiler"
    held = "The largest sum of all tensors that one call creates and holds at the same time"
    return f"{held}, with gradients, without q, k and v; counted by torch's {counter}."


def section(title: str, unit: str, figures: Lines, samples: Samples, notes: Sequence[str]) -> Section:
    lengths = list(max(figures.values(), key=len))
    rows = [{"length": n} | {f"{name} ({unit})": figures[name].get(n) for name in figures} for n in lengths]
    last = [row[lengths[-1]] for row in figures.values() if lengths[-1] in row]
    guides = {
        "O(T²)": {n: max(last) * (n / lengths[-1]) ** 2 for n in lengths},
        "O(T)": {n: min(last) * n / lengths[-1] for n in lengths},
    }
    return Section("attention", title, rows, samples, notes, Plot(figures, "length T (tokens)", unit, guides, log=True))
