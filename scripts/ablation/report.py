"""The report of a sweep in tables and words: what was swept, what came out, and what may be said of it.

All texts are plain: who turns them into Markdown or HTML escapes them.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tril.model.intervals import Interval
from tril.scripts.ablation.figures import Picture, estimate, size
from tril.scripts.ablation.results import CONFIG, Run, Sweep, Variant, text_of
from tril.scripts.ablation.statistics import POWER, Comparison

TEMPLATES = Path(__file__).parent
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
SETTINGS = (
    *(
        f"model.{name}"
        for name in (
            "n_layers",
            "dim",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "mlp",
            "mlp_ratio",
            "norm",
            "pos",
            "window",
        )
    ),
    *("model.context_length", "model.resid_dropout", "data.source", "data.path", "data.repo", "data.tokenizer.kind"),
    *(
        "data.tokenizer.vocab_size",
        "data.batch_size",
        "optim.kind",
        "trainer.max_steps",
        "trainer.accumulate_grad_batches",
    ),
)
NO_STATEMENT = {
    "one seed": "not compared, for want of a second seed in common (one seed: no interval)",
    "diverged": "not compared, since a loss is not a finite number",
}


@dataclass(frozen=True)
class Table:
    header: Sequence[str]
    rows: list[list[str]]
    words: tuple[int, ...] = (0,)  # columns that are no numbers and stand left


@dataclass(frozen=True)
class Section:
    title: str
    before: Sequence[str] = ()
    table: Table | None = None
    after: Sequence[str] = ()
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True)
class Report:
    title: str
    answer: str
    warnings: list[str]
    sections: list[Section]


def write_up(
    sweep: Sweep,
    which: str,
    *,
    comparisons: dict[str, Comparison],
    configs: list[dict[str, object]],
    pictures: list[Picture],
) -> Report:
    """The whole report; comparisons with the baseline by label, of the `which` (final or best) losses; configs: see `read_configs`."""
    drawn = Section("Pictures", [] if pictures else ["There is no validation loss to draw yet."], pictures=pictures)
    sections = [
        swept(sweep),
        settings(sweep, configs),
        losses(sweep),
        costs(sweep),
        compared(sweep, which, comparisons),
        drawn,
    ]
    return Report(f"Sweep {sweep.folder}", answer(sweep, which, comparisons), warnings(sweep), sections)


def answer(sweep: Sweep, which: str, comparisons: dict[str, Comparison]) -> str:
    """The comparison in one sentence, and how many cells it lacks."""
    cells, base = runs(sweep), sweep.baseline
    left = sum(run.state != "finished" for run in cells)
    lacking = f" {left} of {len(cells)} cells {'has' if left == 1 else 'have'} not finished." if left else ""
    if not base.finished:
        who = (
            "No cell"
            if left == len(cells)
            else f"The baseline {base.label} is not finished with any seed: none of its cells"
        )
        return f"{who} has finished, so there is nothing to compare yet.{lacking}"
    if not comparisons:
        n, found = len(base.finished), spread(estimate(base, f"{which}_val_loss"), alone=" (one seed: no interval)")
        return f"There is one variant, {base.label}: {which} validation loss {found} nats per token over {plural(n, 'seed')}.{lacking}"
    parts = []
    for verdict in ("better", "worse"):
        some = [(label, found) for label, found in comparisons.items() if found.verdict == verdict]
        parts += [
            f"{named(label)} is {verdict} by {spread(found.difference).lstrip('-')} {found.unit}"
            for label, found in some
        ]
    for verdict, words in ({"not distinguishable": "not distinguishable from it"} | NO_STATEMENT).items():
        labels = [named(label) for label, found in comparisons.items() if found.verdict == verdict]
        if labels:
            parts.append(f"{', '.join(labels)} {'is' if len(labels) == 1 else 'are'} {words}")
    counts = [found.difference.n for found in comparisons.values() if found.verdict not in NO_STATEMENT]
    over = f", over {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds" if counts else ""
    return f"Against {named(base.label)}{over}: {'; '.join(parts)}.{lacking}"


# ---------------------------------------------------------------- what was done


def swept(sweep: Sweep) -> Section:
    """Keys, values, seeds, and how far the cells are."""
    lines = [f"{key}: {listed(text_of(variant.values[key]) for variant in sweep.variants)}" for key in sweep.keys]
    seeds = listed(sorted({run.seed for run in runs(sweep)}))
    lines += [f"seed: {seeds}", f"Baseline: {sweep.baseline.label}."]
    count = Counter(run.state for run in runs(sweep))
    states = ", ".join(f"{count[state]} {state}" for state in STATES)
    lines.append(f"{plural(len(runs(sweep)), 'cell')}, each a run of one variant with one seed: {states}.")
    rest = [(variant, run) for variant in sweep.variants for run in variant.runs if run.state != "finished"]
    rows = [[variant.label, str(run.seed), run.state, run.message] for variant, run in rest]
    header = ["variant", "seed", "state", "last line of its output, where it failed"]
    return Section("What was swept", lines, Table(header, rows, (0, 2, 3)) if rows else None)


def settings(sweep: Sweep, configs: list[dict[str, object]]) -> Section:
    """What the cells have in common, as their config.yaml and summary.json say."""
    found = {name: [text_of(config.get(name)) for config in configs] for name in SETTINGS}
    found["training tokens"] = [
        f"{summary['tokens']:,}" for summary in summaries(sweep) if summary.get("tokens") is not None
    ]
    found |= {words: [text_of(summary.get(name)) for summary in summaries(sweep)] for name, words in CONDITIONS.items()}
    found = {name: list(dict.fromkeys(values)) for name, values in found.items() if set(values) - {"null"}}
    rows = [
        [name, values[0] if len(values) == 1 else f"differs: {'; '.join(values)}"] for name, values in found.items()
    ]
    after = ["What is null in all cells is left out. A code version with a + had changes that were not committed."]
    return Section(
        "Settings of the cells",
        [] if rows else ["No cell has begun."],
        Table(["setting", "value"], rows, (0, 1)),
        after,
    )


def read_configs(sweep: Sweep) -> list[dict[str, object]]:
    """The settings of each cell that has begun, by dotted names. Raises ValueError for a file that cannot be read."""
    import yaml

    def flat(values: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
        for key, value in values.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]

    paths = [run.folder / CONFIG for run in runs(sweep) if (run.folder / CONFIG).is_file()]
    try:
        return [dict(flat(yaml.safe_load(path.read_text(encoding="utf-8")) or {})) for path in paths]
    except yaml.YAMLError as error:
        raise ValueError(
            f"a {CONFIG} below {sweep.folder} is not readable as yaml ({error}); restore it, or remove it"
        ) from error


def warnings(sweep: Sweep) -> list[str]:
    """What makes finished cells less comparable than they look."""
    done, said = summaries(sweep), []
    for name, words in CONDITIONS.items():
        count = Counter("not recorded" if summary.get(name) is None else text_of(summary[name]) for summary in done)
        if len(count) > 1:
            cells = "; ".join(f"{value} ({plural(n, 'cell')})" for value, n in count.most_common())
            said.append(
                f"The finished cells differ in their {words}: {cells}. Differences between variants may come from that."
            )
    if len({summary.get("data_fingerprint") for summary in done}) > 1:
        said.append(
            "The finished cells differ in their text or tokenizer: compare their bits per byte, not their nats per token."
        )
    leaks = sum("LEAK" in str(summary.get("causality")) for summary in done)
    if leaks:
        said.append(
            f"The losses of {plural(leaks, 'finished cell')} are false: the model sees the tokens that it is to predict."
        )
    return said


# ---------------------------------------------------------------- what came out


def losses(sweep: Sweep) -> Section:
    """The main table: a row a variant."""
    rows = []
    for variant in sweep.variants:
        mark = " (baseline)" if variant is sweep.baseline else ""
        rows.append([variant.label + mark, seeds_of(variant), *(spread(estimate(variant, name)) for name in LOSSES)])
    after = [
        "Each number is the mean over the finished seeds of a variant, on the whole validation text. The number behind ± is half the "
        "width of its 95 % confidence interval, from Student's t distribution: if the sweep were done again and again with other seeds, "
        "about 95 of 100 such intervals would hold the true mean. Few seeds give wide intervals.",
        "Final is the loss at the end of training. Best is the lowest of all validations of a run, which flatters it a little. A loss in "
        "nats per token depends on the tokenizer, bits per byte do not.",
    ]
    if any(len(variant.finished) == 1 for variant in sweep.variants):
        after.append("One seed: no interval. A single run does not tell how far another seed would have ended from it.")
    if any(len(variant.finished) < len(variant.runs) for variant in sweep.variants):
        after.append("Cells that have not finished are in no mean; their curves are drawn as far as they go.")
    if any("diverged" in row for row in rows):
        after.append("Diverged: the loss of at least one seed is not a finite number, so there is no mean.")
    return Section("Losses", table=Table(["variant", "seeds", *LOSSES.values()], rows), after=after)


def costs(sweep: Sweep) -> Section:
    """How large the variants are, and what their training took."""
    rows = []
    for variant in sweep.variants:
        figures = [(size_of(variant, name), ",.0f") for name in SIZES]
        figures += [(median_of(variant, name), form) for name, (_, form) in SPEEDS.items()]
        shown = [
            "-" if value is None else f"{value:.3e}" if value >= 1e10 else format(value, form)
            for value, form in figures
        ]
        rows.append([variant.label, *shown])
    after = [
        "Active parameters are those that are multiplied for every token: all but look-up tables. FLOPs per token count the forward and "
        "the backward pass; training FLOPs are that times the training tokens. Speed, memory and wall time are medians over the finished "
        "seeds, and depend on the machine and on what else it did."
    ]
    return Section(
        "Size and speed",
        table=Table(["variant", *SIZES.values(), *(words for words, _ in SPEEDS.values())], rows),
        after=after,
    )


def compared(sweep: Sweep, which: str, comparisons: dict[str, Comparison]) -> Section:
    """Each variant beside the baseline."""
    title, n = f"Compared with {sweep.baseline.label}: {which} validation loss", len(comparisons)
    if not comparisons:
        return Section(title, ["There is no other variant to compare it with."])
    rows = []
    for label, found in comparisons.items():
        more = "" if found.more_seeds is None else str(found.more_seeds)
        difference = spread(found.difference, sign="+") if found.difference.n else "-"
        rows.append(
            [
                label,
                str(found.difference.n),
                difference,
                found.unit,
                p_value(found.p),
                found.verdict,
                more,
                found.remark,
            ]
        )
    chances = "so chance has one opportunity" if n == 1 else f"so chance has {n} opportunities"
    after = [
        "The difference is variant minus baseline: below 0 the variant is better. Each seed of the variant is set beside the same seed of "
        "the baseline, on the same windows of the validation text, so what makes a seed or a window hard for both cancels. The interval "
        "rests on Student's t over seeds, and is widened by what another text of the same kind could change.",
        f"Here {'is' if n == 1 else 'are'} {plural(n, 'comparison')}, {chances} to look like an effect. Bonferroni's correction allows for "
        f"that: each p is multiplied by {n}, and the number behind ± is half of a {100 * (1 - 0.05 / n):.4g} % interval. If no variant "
        "differed from the baseline, at most 5 of 100 such sweeps would call any of them better or worse.",
        "Not distinguishable does not mean equal: these seeds cannot tell the two apart. More seeds is how many more would settle it with "
        f"a chance of {100 * POWER:.0f} %, if difference and spread stay as seen; where it is empty, see the remark.",
    ]
    header = ["variant", "seeds in common", "difference", "unit", "p, corrected", "verdict", "more seeds", "remark"]
    return Section(title, table=Table(header, rows, (0, 3, 5, 7)), after=after)


# ---------------------------------------------------------------- figures and their words


def runs(sweep: Sweep) -> list[Run]:
    return [run for variant in sweep.variants for run in variant.runs]


def summaries(sweep: Sweep) -> list[dict]:
    return [run.summary for variant in sweep.variants for run in variant.finished]


def size_of(variant: Variant, name: str) -> float | None:
    """The same for all seeds: as the first finished one has it, else as planned."""
    return next((size(run, name) for run in (*variant.finished, *variant.runs)), None)


def median_of(variant: Variant, name: str) -> float | None:
    """Over the finished seeds."""
    values = [run.summary[name] for run in variant.finished if run.summary.get(name) is not None]
    return statistics.median(values) if values else None


def seeds_of(variant: Variant) -> str:
    done, planned = len(variant.finished), len(variant.runs)
    count = str(done) if done == planned else f"{done} of {planned}"
    return f"{count} (one seed: no interval)" if done == 1 else count


def spread(interval: Interval | None, *, sign: str = "", alone: str = "") -> str:
    """2.8516 ± 0.0123, with more digits where the interval is narrower; `alone` is said behind a number that has no interval."""
    if interval is None:
        return "-"
    if not math.isfinite(interval.mean):
        return "diverged"
    if interval.low is None:
        return f"{interval.mean:{sign}.4f}{alone}"
    half = (interval.high - interval.low) / 2
    digits = min(6, max(4, 1 - math.floor(math.log10(half)))) if half > 0 else 4
    return f"{interval.mean:{sign}.{digits}f} ± {half:.{digits}f}"


def p_value(p: float | None) -> str:
    return "-" if p is None else "below 0.0001" if p < 1e-4 else f"{p:.2g}"


def named(label: str) -> str:
    """A label with commas of its own, in a list."""
    return f"({label})" if ", " in label else label


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listed(values: Iterable[object]) -> str:
    return ", ".join(dict.fromkeys(map(str, values)))
