"""what=cost: how the time of a training step grows with each size of the model."""

import statistics
from dataclasses import replace
from functools import partial

from tril.scripts.benchmarks.section import Bench, Plot, Section
from tril.scripts.benchmarks.timing import interleaved, paired_ratio, step_seconds, steps_within
from tril.scripts.benchmarks.training_speed import BareLoop, new_module, new_windows
from tril.scripts.cli.config import RunConfig

FACTORS = (0.5, 1.0, 2.0, 4.0)
MAX_SECONDS = 2.0  # of a step at the largest factor; a longer one is left out
REPETITION_SECONDS = 0.3  # of all steps in one repetition, if `steps` allows so many
SIZES = {  # size: the group of settings and the keys that grow together
    "width": ("model", ("dim", "n_heads", "n_kv_heads")),
    "depth": ("model", ("n_layers",)),
    "context": ("model", ("context_length",)),
    "batch": ("data", ("batch_size",)),
}


def run(bench: Bench) -> list[Section]:
    rows, samples, lines = [], {}, {}
    for size, (group, keys) in SIZES.items():
        configs = scaled(bench.run_config, size)
        times = measure(bench, size, configs)
        ratios = {factor: paired_ratio(seconds, times[1.0]) for factor, seconds in times.items()}
        rows += [
            {
                "size": size,
                "factor": factor,
                "value": getattr(getattr(configs[factor], group), keys[0]),
                "ms per step": 1000 * statistics.median(times[factor]),
                "relative to the configured step (median)": ratio["median"],
                "(smallest)": ratio["smallest"],
                "(largest)": ratio["largest"],
            }
            for factor, ratio in ratios.items()
        ]
        samples |= {f"{size} x {factor:g} (s)": seconds for factor, seconds in times.items()}
        lines[size] = {factor: ratio["median"] for factor, ratio in ratios.items()}
    notes = [
        "The bare loop of what=train with one size changed at a time. The head size is constant: width adds heads.",
        f"The median of {bench.config.repeats} repetitions in alternating order; each is the mean of as many steps as "
        f"take {REPETITION_SECONDS * 1e3:.0f} ms, 1 to {bench.config.steps}. Ratios are within a repetition.",
        f"Left out: factor {FACTORS[-1]:g} if a step would take over {MAX_SECONDS:g} s; sizes that are not whole.",
    ]
    guides = {"proportional": {factor: factor for factor in FACTORS}}
    plot = Plot(lines, "factor on one size", "relative to the configured step", guides, log=True)
    return [Section("cost", "Time of a training step against the sizes of the model", rows, samples, notes, plot)]


def measure(bench: Bench, size: str, configs: dict[float, RunConfig]) -> dict[float, list[float]]:
    """Seconds of a step in every repetition, by factor."""
    first: dict[float, float] = {}
    tasks = {}
    for factor, config in configs.items():
        if factor == FACTORS[-1] and extrapolated(first) > MAX_SECONDS:
            continue
        changed = replace(bench, run_config=config)
        step = BareLoop(new_module(changed), new_windows(changed), changed).step
        first[factor] = step_seconds(step, bench.device, warmup=1)[0]  # the warm-up compiles
        steps = steps_within(REPETITION_SECONDS, first[factor], bench.config.steps)
        tasks[factor] = partial(step_seconds, step, bench.device, warmup=1, steps=steps)
    times = interleaved(tasks, bench.config.repeats, f"cost, {size}")
    return {factor: [statistics.mean(seconds) for seconds in repetitions] for factor, repetitions in times.items()}


def extrapolated(first: dict[float, float]) -> float:
    """Seconds at factor 4, if the step grows from 2 to 4 as it did from 1 to 2."""
    return first[2.0] ** 2 / first[1.0]


def scaled(config: RunConfig, size: str) -> dict[float, RunConfig]:
    """The settings at every factor that gives whole numbers."""
    name, keys = SIZES[size]
    group = getattr(config, name)
    configs = {}
    for factor in FACTORS:
        values = {key: factor * value for key in keys if (value := getattr(group, key)) is not None}
        if all(value.is_integer() for value in values.values()):
            changed = replace(group, **{key: int(value) for key, value in values.items()})
            configs[factor] = replace(config, **{name: changed})
    return configs
