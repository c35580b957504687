"""what=cost: how the time of a training step grows with the model, each of its sizes changed by itself."""

import statistics
from dataclasses import replace
from functools import partial

from tril.scripts.benchmarks.section import Bench, Section
from tril.scripts.benchmarks.timing import interleaved, paired_ratio, step_seconds
from tril.scripts.benchmarks.training_speed import BareLoop, new_module, new_windows
from tril.scripts.common.run_config import Plan

FACTORS = (0.5, 1.0, 2.0, 4.0)
LONG = 4.0  # the factor that is left out where a step would take longer than
SLOWEST = 2.0  # seconds
REPETITION = 0.3  # seconds that the steps of one repetition take together, where `steps` allows so many

SIZES = {"width": "dim", "depth": "n_layers", "context": "context_length", "batch": "batch_size"}
Times = dict[str, dict[float, list[float]]]  # of each size and factor: seconds of a step in every repetition


def run(bench: Bench) -> list[Section]:
    times = {size: measured(bench, size) for size in SIZES}
    rows = [row(bench.plan, size, factor, found) for size, found in times.items() for factor in found]
    notes = [
        "The bare loop of what=train with one size changed at a time. The size of a head stays: a wider model has more heads.",
        f"The median of {bench.repeats} repetitions, the factors of one size in turn; in each the mean of as many steps as take "
        f"{REPETITION * 1e3:.0f} ms, 1 to {bench.steps} (steps). It is compared with the configured model's in the same repetition.",
        f"Left out: factor {LONG:g} where a step would take longer than {SLOWEST:g} s, and factors that give no whole number.",
    ]
    samples = {f"{size} x {factor:g} (s)": values for size, found in times.items() for factor, values in found.items()}
    return [
        Section(
            "cost", "Time of a training step against the sizes of the model", rows, samples, notes, partial(draw, times)
        )
    ]


def measured(bench: Bench, size: str) -> dict[float, list[float]]:
    first: dict[float, float] = {}
    tasks = {}
    for factor, plan in plans(bench.plan, size).items():
        if factor == LONG and expected(first) > SLOWEST:
            continue
        its = replace(bench, plan=plan)
        loop = BareLoop(new_module(its), new_windows(its), its)
        first[factor] = step_seconds(loop.step, warmup=1, steps=1, device=bench.device)[0]  # the one before compiles
        steps = max(1, min(bench.steps, round(REPETITION / first[factor])))
        tasks[factor] = partial(mean_step, loop, steps, bench.device)
    return interleaved(tasks, bench.repeats, f"cost, {size}")


def expected(first: dict[float, float]) -> float:
    """Seconds at factor 4: as much longer than those at 2 as these are than those at 1."""
    return first[2.0] ** 2 / first[1.0]


def mean_step(loop: BareLoop, steps: int, device: str) -> float:
    return statistics.mean(step_seconds(loop.step, warmup=1, steps=steps, device=device))


def plans(plan: Plan, size: str) -> dict[float, Plan]:
    """The plan at every factor that gives whole numbers."""
    model, data = plan.model, plan.data
    made = {}
    for factor in FACTORS:
        scaled = {name: factor * getattr(model, name) for name in ("dim", "n_heads", "n_layers", "context_length")}
        scaled |= {"n_kv_heads": model.n_kv_heads and factor * model.n_kv_heads, "batch_size": factor * data.batch_size}
        names = ("dim", "n_heads", "n_kv_heads") if size == "width" else (SIZES[size],)
        values = {name: scaled[name] for name in names if scaled[name] is not None}
        if any(n != int(n) for n in values.values()):
            continue
        values = {name: int(n) for name, n in values.items()}
        changed = {"data": replace(data, **values)} if size == "batch" else {"model": replace(model, **values)}
        made[factor] = replace(plan, **changed)
    return made


def row(plan: Plan, size: str, factor: float, found: dict[float, list[float]]) -> dict[str, object]:
    changed = plans(plan, size)[factor]
    value = getattr(changed.data if size == "batch" else changed.model, SIZES[size])
    median, smallest, largest = paired_ratio(found[factor], found[1.0])
    return {
        "size": size,
        "factor": factor,
        "value": value,
        "ms per step": 1000 * statistics.median(found[factor]),
        "times the configured step (median)": median,
        "(smallest)": smallest,
        "(largest)": largest,
    }


def draw(times: Times, axes) -> None:
    """Both axes logarithmic: a cost that is proportional lies on the dashed line."""
    for size, found in times.items():
        axes.loglog(
            list(found),
            [paired_ratio(values, found[1.0])[0] for values in found.values()],
            "o-",
            ms=4,
            lw=1.3,
            label=size,
        )
    axes.plot(FACTORS, FACTORS, "--", color="0.5", lw=1, label="proportional", zorder=0)
    ticks = [1 / 4, 1 / 2, 1, 2, 4, 8, 16]
    axes.set(title="Time of a training step", xlabel="factor on one size", ylabel="times the configured step")
    axes.set_xticks(FACTORS, [f"{factor:g}" for factor in FACTORS])
    low, high = axes.get_ylim()
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.legend(fontsize=8)
