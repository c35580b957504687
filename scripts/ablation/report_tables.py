"""The tables of a sweep's report: unfinished runs, settings, losses, sizes and speeds, and the comparisons."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tril.model.intervals import Interval
from tril.scripts.ablation.plot_style import estimate, size
from tril.scripts.ablation.results import Sweep, Variant, text_of
from tril.scripts.ablation.run_files import CONFIG, read_config
from tril.scripts.ablation.statistics import Comparison

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


@dataclass(frozen=True)
class Table:
    """Header and rows; `words` are the text columns, aligned to the left."""

    header: Sequence[str]
    rows: list[list[str]]
    words: tuple[int, ...] = (0,)


def unfinished_runs(sweep: Sweep) -> Table:
    rows = [
        [variant.label, str(run.seed), run.state, run.message]
        for variant in sweep.variants
        for run in variant.runs
        if run.state != "finished"
    ]
    return Table(["variant", "seed", "state", "last line of its output, if it failed"], rows, (0, 2, 3))


def settings(sweep: Sweep, configs: Mapping[Path, Mapping[str, object]]) -> Table:
    """The settings that the runs have in common, from config.yaml and summary.json."""
    names = [f"{group}.{name}" for group, keys in SETTINGS.items() for name in keys.split()]
    values = {name: [text_of(config.get(name)) for config in configs.values()] for name in names}
    tokens = [summary["tokens"] for summary in sweep.summaries if summary.get("tokens") is not None]
    values["training tokens"] = [f"{n:,}" for n in tokens]
    values |= {words: [text_of(each.get(name)) for each in sweep.summaries] for name, words in CONDITIONS.items()}
    rows = []
    for name, texts in values.items():
        distinct = list(dict.fromkeys(texts))
        if set(distinct) - {"null"}:
            rows.append([name, distinct[0] if len(distinct) == 1 else f"differs: {'; '.join(distinct)}"])
    return Table(["setting", "value"], rows, (0, 1))


def read_configs(sweep: Sweep) -> dict[Path, dict[str, object]]:
    """Folder -> settings of each run that has started, by dotted names. Raises ValueError for a damaged file."""
    folders = [run.folder for run in sweep.runs if (run.folder / CONFIG).is_file()]
    return {folder: config for folder in folders if (config := read_config(folder / CONFIG)) is not None}


def losses(sweep: Sweep) -> Table:
    """The main table: one row for each variant."""
    rows = []
    for variant in sweep.variants:
        mark = " (baseline)" if variant is sweep.baseline else ""
        rows.append([variant.label + mark, seeds_of(variant), *(spread(estimate(variant, name)) for name in LOSSES)])
    return Table(["variant", "seeds", *LOSSES.values()], rows)


def costs(sweep: Sweep) -> Table:
    """Sizes of the variants, and speed and memory of their training."""
    rows = []
    for variant in sweep.variants:
        figures = [(size_of(variant, name), ",.0f") for name in SIZES]
        figures += [(median_of(variant, name), form) for name, (_, form) in SPEEDS.items()]
        rows.append([variant.label, *(figure(value, form) for value, form in figures)])
    return Table(["variant", *SIZES.values(), *(words for words, _ in SPEEDS.values())], rows)


def compared(comparisons: dict[str, Comparison]) -> Table:
    """Each variant compared with the baseline."""
    rows = []
    for label, found in comparisons.items():
        more = "" if found.more_seeds is None else str(found.more_seeds)
        difference = spread(found.difference, sign="+") if found.difference.n else "-"
        tested = [found.verdict, difference, found.unit, p_value(found.p), str(found.difference.n)]
        rows.append([label, *tested, more, found.remark])
    p = "p, corrected" if len(comparisons) > 1 else "p"
    header = ["variant", "verdict", "difference", "unit", p, "seeds in common", "more seeds", "remark"]
    return Table(header, rows, (0, 1, 3, 7))


def details(comparisons: dict[str, Comparison]) -> Table:
    """What the test of each comparison rests on; without rows if none has an interval."""
    rows = []
    for label, found in comparisons.items():
        if not found.method:
            continue
        method = found.method if len(comparisons) > 1 else found.method.partition(",")[0]  # nothing to correct for
        row = [label, method, f"{found.df:.3g}", *_text_columns(found), f"{found.stage}", f"{found.alpha:g}"]
        row += ["-" if found.detectable is None else f"{found.detectable:.2g}"]
        row += [] if found.margin is None else [p_value(found.p_equal)]
        rows.append(row)
    header = [
        "variant",
        "variance between seeds",
        "degrees of freedom",
        "parts of the text",
        "effective number of them",
    ]
    header += ["stage", "level", "detectable difference"]
    has_margin = any(found.margin is not None for found in comparisons.values())
    return Table([*header, *["p, equal within the margin"] * has_margin], rows, (0, 1, 3))


def _text_columns(found: Comparison) -> list[str]:
    """The clusters of the text, and the effective number of them."""
    if not found.n_clusters or not found.clusters:
        return ["the whole text", "-"]
    return [f"{found.n_clusters} {found.clusters}", f"{found.effective_clusters:.1f}"]


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


def spread(interval: Interval | None, *, sign: str = "", alone: str = "") -> str:
    """2.8516 ± 0.0123, with more digits for a narrower interval; `alone` follows a mean without an interval."""
    if interval is None:
        return "-"
    if not math.isfinite(interval.mean):
        return "diverged"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{sign}.4f}{alone}"
    half = (interval.high - interval.low) / 2
    digits = min(6, max(4, 1 - math.floor(math.log10(half)))) if half > 0 else 4
    return f"{interval.mean:{sign}.{digits}f} ± {half:.{digits}f}"


def p_value(p: float | None) -> str:
    return "-" if p is None else "below 0.0001" if p < 1e-4 else f"{p:.2g}"
