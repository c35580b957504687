"""The content of a sweep's report: its answer in one sentence and its tables; report_text.jinja has the text."""

from collections import Counter
from typing import Any

from tril.scripts.ablation import report_tables
from tril.scripts.ablation.plot_style import Picture, estimate
from tril.scripts.ablation.report_tables import CONDITIONS, spread
from tril.scripts.ablation.results import Sweep, text_of
from tril.scripts.ablation.statistics import POWER, Comparison
from tril.scripts.common.formats import plural

NO_STATEMENT = {
    "one seed": "not compared, because fewer than two seeds are common to both (one seed: no interval)",
    "diverged": "not compared, because a loss is not a finite number",
}


def write_up(
    sweep: Sweep, which: str, comparisons: dict[str, Comparison], configs: list[dict], pictures: list[Picture]
) -> dict[str, Any]:
    """The values of the templates report.md.jinja and report.html.

    Args:
        sweep: finished or not.
        which: "final" or "best" loss.
        comparisons: label -> comparison with the baseline of the `which` losses.
        configs: see `report_tables.read_configs`.
        pictures: see `figures.draw`.
    """
    values = {key: [text_of(variant.values[key]) for variant in sweep.variants] for key in sweep.keys}
    values["seed"] = [str(seed) for seed in sorted(run.seed for run in sweep.runs)]
    summaries = sweep.summaries
    conditions = {
        words: Counter("not recorded" if each.get(name) is None else text_of(each[name]) for each in summaries)
        for name, words in CONDITIONS.items()
    }
    return {
        "title": f"Sweep {sweep.folder}",
        "answer": answer(sweep, which, comparisons),
        "sweep": sweep,
        "which": which,
        "swept": {key: ", ".join(dict.fromkeys(texts)) for key, texts in values.items()},
        "states": Counter(run.state for run in sweep.runs),
        "unfinished": report_tables.unfinished_runs(sweep),
        "settings": report_tables.settings(sweep, configs),
        "losses": report_tables.losses(sweep),
        "costs": report_tables.costs(sweep),
        "compared": report_tables.compared(comparisons),
        "power": POWER,
        "conditions": conditions,
        "texts": {each.get("data_fingerprint") for each in summaries},
        "leaks": sum("LEAK" in str(each.get("causality")) for each in summaries),
        "pictures": pictures,
    }


def answer(sweep: Sweep, which: str, comparisons: dict[str, Comparison]) -> str:
    """The comparison in one sentence, and how many runs are not finished."""
    base, total = sweep.baseline, len(sweep.runs)
    left = sum(run.state != "finished" for run in sweep.runs)
    missing = f" {left} of {total} runs {'has' if left == 1 else 'have'} not finished." if left else ""
    if not base.finished:
        subject = "No run" if left == total else f"No run of the baseline {base.label}"
        return f"{subject} has finished, so there is nothing to compare yet.{missing}"
    if not comparisons:
        mean = spread(estimate(base, f"{which}_val_loss"), alone=" (one seed: no interval)")
        seeds = plural(len(base.finished), "seed")
        return (
            f"There is one variant, {base.label}: {which} validation loss {mean} nats per token over {seeds}.{missing}"
        )
    parts = [
        f"{named(label)} is {verdict} by {spread(comparison.difference).lstrip('-')} {comparison.unit}"
        for verdict in ("better", "worse")
        for label, comparison in comparisons.items()
        if comparison.verdict == verdict
    ]
    for verdict, words in ({"not distinguishable": "not distinguishable from it"} | NO_STATEMENT).items():
        labels = [named(label) for label, comparison in comparisons.items() if comparison.verdict == verdict]
        if labels:
            parts.append(f"{', '.join(labels)} {'is' if len(labels) == 1 else 'are'} {words}")
    counts = [comparison.difference.n for comparison in comparisons.values() if comparison.verdict not in NO_STATEMENT]
    over = f", over {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds" if counts else ""
    return f"Against {named(base.label)}{over}: {'; '.join(parts)}.{missing}"


def named(label: str) -> str:
    """A label as an item of a list: in parentheses if it contains commas."""
    return f"({label})" if ", " in label else label
