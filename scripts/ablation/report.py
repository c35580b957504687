"""The content of a sweep's report: its answer in one sentence and its tables; report_text.jinja has the text."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tril.scripts.ablation import report_tables, training_tables
from tril.scripts.ablation.plot_style import SECTIONS, Picture, estimate
from tril.scripts.ablation.report_tables import CONDITIONS, spread
from tril.scripts.ablation.results import Sweep, text_of
from tril.scripts.ablation.run_files import check_same_validation
from tril.scripts.ablation.stages import FAMILY_ALPHA
from tril.scripts.ablation.statistics import EQUAL, POOLED, POWER, Comparison
from tril.scripts.ablation.tuning_results import read_tuning
from tril.scripts.cli.formats import plural

NO_STATEMENT = {
    "preliminary": "not compared yet, because its stage has unfinished runs",
    "one seed": "not compared, because fewer than two seeds are common to both (one seed: no interval)",
    "diverged": "not compared, because a loss is not a finite number",
}


def write_up(
    sweep: Sweep,
    which: str,
    *,
    comparisons: dict[str, Comparison],
    configs: training_tables.Configs,
    pictures: Sequence[Picture],
    published: bool = False,
) -> dict[str, Any]:
    """The values of the templates report.md.jinja and report.html.

    Args:
        sweep: finished or not.
        which: "final" or "best" loss.
        comparisons: label -> comparison with the baseline of the `which` losses.
        configs: see `report_tables.read_configs`.
        pictures: see `figures.draw`.
        published: the report lies next to the archive of its runs.
    """
    tunings = read_tuning(sweep)
    return {
        "title": f"Sweep over {', '.join(sweep.keys)}" if sweep.keys else "Runs of one configuration",
        "answer": answer(sweep, which, comparisons),
        "sweep": sweep,
        "which": which,
        "published": published,
        "swept": swept(sweep),
        "launches": launches(sweep),
        "states": Counter(run.state for run in sweep.runs),
        "unfinished": report_tables.unfinished_runs(sweep),
        "settings": report_tables.settings(sweep, configs),
        "losses": report_tables.losses(sweep),
        "costs": report_tables.costs(sweep),
        "training": training_tables.training(sweep, configs),
        "rates": training_tables.effective_rates(sweep, configs),
        "tunings": tunings,
        "tuning_losses": training_tables.tuning_losses(tunings),
        "tuning_costs": training_tables.tuning_costs(sweep, tunings),
        "compared": report_tables.compared(comparisons),
        "details": report_tables.details(comparisons),
        "test": next((found for found in comparisons.values() if found.method), None),
        "power": POWER,
        "pooled": POOLED,
        "family_alpha": FAMILY_ALPHA,
        "conditions": conditions(sweep),
        "texts": {each.get("data_fingerprint") for each in sweep.summaries},
        "partial": check_same_validation(sweep.runs),
        "leaks": sum("LEAK" in str(each.get("causality")) for each in sweep.summaries),
        "pictures": {name: [each for each in pictures if each.section == name] for name in SECTIONS},
    }


def swept(sweep: Sweep) -> dict[str, str]:
    """The values of each swept key, and the seeds."""
    values = {key: [text_of(variant.values[key]) for variant in sweep.variants] for key in sweep.keys}
    values["seed"] = [str(seed) for seed in sorted(run.seed for run in sweep.runs)]
    return {key: ", ".join(dict.fromkeys(texts)) for key, texts in values.items()}


def launches(sweep: Sweep) -> list[tuple[str, str]]:
    """A description and the command of each stage of the sweep, as far as sweep.json has them."""
    stages = sweep.index.get("stages", [])
    if not stages:
        command = sweep.index.get("command")
        return [("Command:", str(command))] if command else []
    found = []
    for number, stage in enumerate(stages, 1):
        left = sum(run.state != "finished" for run in sweep.runs if run.seed in stage["seeds"])
        seeds = f"seed {', '.join(map(str, stage['seeds']))}" if stage["seeds"] else "more variants"
        words = [seeds, *([str(stage["date"])] if stage.get("date") else [])]
        words += [f"preliminary: {plural(left, 'run')} not finished"] if left else []
        found.append((f"Stage {number} ({'; '.join(words)}):", str(stage.get("command") or "command not recorded")))
    return found


def conditions(sweep: Sweep) -> dict[str, Counter[str]]:
    """How many finished runs have each code version, device, precision and number of threads."""
    return {
        words: Counter("not recorded" if each.get(name) is None else text_of(each[name]) for each in sweep.summaries)
        for name, words in CONDITIONS.items()
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
    margin = next((comparison.margin for comparison in comparisons.values() if comparison.margin is not None), None)
    others = {EQUAL: f"equal to it within {margin:g} nats per token"} if margin else {}
    for verdict, words in (others | {"not distinguishable": "not distinguishable from it"} | NO_STATEMENT).items():
        labels = [named(label) for label, comparison in comparisons.items() if comparison.verdict == verdict]
        if labels:
            parts.append(f"{', '.join(labels)} {'is' if len(labels) == 1 else 'are'} {words}")
    counts = [comparison.difference.n for comparison in comparisons.values() if comparison.verdict not in NO_STATEMENT]
    over = f", over {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds" if counts else ""
    return f"Against {named(base.label)}{over}: {'; '.join(parts)}.{missing}"


def named(label: str) -> str:
    """A label as an item of a list: in parentheses if it contains commas."""
    return f"({label})" if ", " in label else label
