"""The sections of a sweep's report: what was swept, the settings, losses, sizes and speeds, and the comparisons."""

import statistics
from collections import Counter
from collections.abc import Sequence

from tril.scripts.ablation.plot_style import estimate, size
from tril.scripts.ablation.report_parts import Section, Table, listed, p_value, spread
from tril.scripts.ablation.results import Sweep, Variant, text_of
from tril.scripts.ablation.run_files import CONFIG, read_config
from tril.scripts.ablation.statistics import POWER, Comparison
from tril.scripts.common.formats import plural

STATES = ("finished", "unfinished", "failed", "not started")
LOSSES = {
    "final_val_loss": "final loss, nats per token",
    "final_val_bpb": "final bits per byte",
    "best_val_loss": "best loss, nats per token",
    "best_val_bpb": "best bits per byte",
}
SIZES = {
    "parameters": "parameters",
    "parameters_without_embeddings": "without embeddings",
    "active_parameters": "active",
    "flops_per_token": "FLOPs per token",
    "training_flops": "training FLOPs",
}
SPEEDS = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "peak_memory_gb": ("peak memory, GB", ".2f"),
    "seconds": ("wall time, s", ",.0f"),
}
CONDITIONS = {"code": "code version", "device": "device", "precision": "precision", "threads": "threads"}
SETTINGS = {
    "model": "n_layers dim n_heads n_kv_heads head_dim mlp mlp_ratio norm pos window context_length resid_dropout",
    "data": "source path repo tokenizer.kind tokenizer.vocab_size batch_size",
    "optim": "kind",
    "trainer": "max_steps accumulate_grad_batches",
}


def swept(sweep: Sweep) -> Section:
    """Keys, values, seeds, and the states of the runs."""
    lines = [f"{key}: {listed(text_of(variant.values[key]) for variant in sweep.variants)}" for key in sweep.keys]
    seeds = listed(sorted({run.seed for run in sweep.runs}))
    counts = Counter(run.state for run in sweep.runs)
    states = ", ".join(f"{counts[state]} {state}" for state in STATES)
    total = f"{plural(len(sweep.runs), 'run')}, each of one variant with one seed"
    lines += [f"seed: {seeds}", f"Baseline: {sweep.baseline.label}.", f"{total}: {states}."]
    rows = [
        [variant.label, str(run.seed), run.state, run.message]
        for variant in sweep.variants
        for run in variant.runs
        if run.state != "finished"
    ]
    header = ["variant", "seed", "state", "last line of its output, if it failed"]
    return Section("What was swept", lines, Table(header, rows, (0, 2, 3)) if rows else None)


def settings(sweep: Sweep, configs: Sequence[dict[str, object]]) -> Section:
    """The settings that the runs have in common, from config.yaml and summary.json."""
    names = [f"{group}.{name}" for group, keys in SETTINGS.items() for name in keys.split()]
    values = {name: [text_of(config.get(name)) for config in configs] for name in names}
    tokens = [summary["tokens"] for summary in sweep.summaries if summary.get("tokens") is not None]
    values["training tokens"] = [f"{n:,}" for n in tokens]
    values |= {words: [text_of(each.get(name)) for each in sweep.summaries] for name, words in CONDITIONS.items()}
    rows = []
    for name, texts in values.items():
        distinct = list(dict.fromkeys(texts))
        if set(distinct) - {"null"}:
            rows.append([name, distinct[0] if len(distinct) == 1 else f"differs: {'; '.join(distinct)}"])
    after = ["Settings that are null in all runs are left out. A code version with a + had uncommitted changes."]
    before = [] if rows else ["No run has started."]
    return Section("Settings of the runs", before, Table(["setting", "value"], rows, (0, 1)), after)


def read_configs(sweep: Sweep) -> list[dict[str, object]]:
    """The settings of each run that has started, by dotted names. Raises ValueError for a damaged file."""
    paths = [run.folder / CONFIG for run in sweep.runs if (run.folder / CONFIG).is_file()]
    return [config for path in paths if (config := read_config(path)) is not None]


def losses(sweep: Sweep) -> Section:
    """The main table: one row for each variant."""
    rows = []
    for variant in sweep.variants:
        mark = " (baseline)" if variant is sweep.baseline else ""
        rows.append([variant.label + mark, seeds_of(variant), *(spread(estimate(variant, name)) for name in LOSSES)])
    after = [
        "Each number is the mean over the finished seeds of a variant, on the whole validation text. The number after ±"
        " is half the width of its 95 % confidence interval, from Student's t distribution: if the sweep were repeated "
        "with other seeds, about 95 of 100 such intervals would contain the true mean. Few seeds give wide intervals.",
        "Final is the loss at the end of training. Best is the lowest of all validations of a run, which is slightly "
        "optimistic. A loss in nats per token depends on the tokenizer, bits per byte do not.",
    ]
    if any(len(variant.finished) == 1 for variant in sweep.variants):
        after.append("One seed: no interval. A single run does not show how much the loss varies between seeds.")
    if any(len(variant.finished) < len(variant.runs) for variant in sweep.variants):
        after.append("Unfinished runs are not included in the means; their curves are drawn as far as they go.")
    if any("diverged" in row for row in rows):
        after.append("Diverged: the loss of at least one seed is not a finite number, so there is no mean.")
    return Section("Losses", table=Table(["variant", "seeds", *LOSSES.values()], rows), after=after)


def costs(sweep: Sweep) -> Section:
    """Sizes of the variants, and speed and memory of their training."""
    rows = []
    for variant in sweep.variants:
        figures = [(size_of(variant, name), ",.0f") for name in SIZES]
        figures += [(median_of(variant, name), form) for name, (_, form) in SPEEDS.items()]
        rows.append([variant.label, *(figure(value, form) for value, form in figures)])
    after = [
        "Active parameters are those that are multiplied for every token: all except look-up tables. FLOPs per token "
        "count the forward and the backward pass; training FLOPs are FLOPs per token times training tokens. Speed, "
        "memory and wall time are medians over the finished seeds and depend on the machine and its other load."
    ]
    header = ["variant", *SIZES.values(), *(words for words, _ in SPEEDS.values())]
    return Section("Size and speed", table=Table(header, rows), after=after)


def compared(sweep: Sweep, which: str, comparisons: dict[str, Comparison]) -> Section:
    """Each variant compared with the baseline."""
    title, n = f"Compared with {sweep.baseline.label}: {which} validation loss", len(comparisons)
    if not comparisons:
        return Section(title, ["There is no other variant to compare it with."])
    rows = []
    for label, found in comparisons.items():
        more = "" if found.more_seeds is None else str(found.more_seeds)
        difference = spread(found.difference, sign="+") if found.difference.n else "-"
        tested = [found.unit, p_value(found.p), found.verdict, more, found.remark]
        rows.append([label, str(found.difference.n), difference, *tested])
    many, chances = ("is", "one opportunity") if n == 1 else ("are", f"{n} opportunities")
    after = [
        "The difference is variant minus baseline: below 0 the variant is better. Each seed of the variant is compared "
        "with the same seed of the baseline, on the same windows of the validation text, so what makes a seed or a "
        "window hard for both cancels. The interval is Student's t over seeds, widened by what another text of the same"
        " kind could change.",
        f"There {many} {plural(n, 'comparison')} here, so chance has {chances} to look like an effect. Bonferroni's "
        f"correction accounts for that: each p is multiplied by {n}, and the number after ± is half of a "
        f"{100 * (1 - 0.05 / n):.4g} % interval. If no variant differed from the baseline, at most 5 of 100 such sweeps"
        " would call any of them better or worse.",
        "Not distinguishable does not mean equal: these seeds cannot distinguish the two. More seeds is how many more "
        f"would settle it with a probability of {100 * POWER:.0f} %, if difference and variance stay as observed; if "
        "it is empty, see the remark.",
    ]
    header = ["variant", "seeds in common", "difference", "unit", "p, corrected", "verdict", "more seeds", "remark"]
    return Section(title, table=Table(header, rows, (0, 3, 5, 7)), after=after)


def size_of(variant: Variant, name: str) -> float | None:
    """A size, equal for all seeds: of the first finished run, else as planned."""
    return next((size(run, name) for run in (*variant.finished, *variant.runs)), None)


def median_of(variant: Variant, name: str) -> float | None:
    """Median over the finished seeds."""
    values = variant.figures(name)
    return statistics.median(values) if values else None


def seeds_of(variant: Variant) -> str:
    """How many seeds are finished."""
    done, planned = len(variant.finished), len(variant.runs)
    count = str(done) if done == planned else f"{done} of {planned}"
    return f"{count} (one seed: no interval)" if done == 1 else count


def figure(value: float | None, form: str) -> str:
    """A number in a format, large ones with an exponent."""
    return "-" if value is None else f"{value:.3e}" if value >= 1e10 else format(value, form)
