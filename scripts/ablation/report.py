"""The report of a sweep: its answer in one sentence, warnings and sections."""

from collections import Counter

from tril.scripts.ablation.plot_style import Picture, estimate
from tril.scripts.ablation.report_parts import Report, Section, named, spread
from tril.scripts.ablation.report_sections import CONDITIONS, compared, costs, losses, settings, swept
from tril.scripts.ablation.results import Sweep, text_of
from tril.scripts.ablation.statistics import Comparison
from tril.scripts.common.formats import plural

NO_STATEMENT = {
    "one seed": "not compared, because fewer than two seeds are common to both (one seed: no interval)",
    "diverged": "not compared, because a loss is not a finite number",
}


def write_up(
    sweep: Sweep,
    which: str,
    *,
    comparisons: dict[str, Comparison],
    configs: list[dict[str, object]],
    pictures: list[Picture],
) -> Report:
    """The whole report.

    Args:
        sweep: finished or not.
        which: "final" or "best" loss.
        comparisons: label -> comparison with the baseline of the `which` losses.
        configs: see `report_sections.read_configs`.
        pictures: see `figures.draw`.
    """
    no_pictures = [] if pictures else ["There is no validation loss to draw yet."]
    sections = [
        swept(sweep),
        settings(sweep, configs),
        losses(sweep),
        costs(sweep),
        compared(sweep, which, comparisons),
        Section("Pictures", no_pictures, pictures=pictures),
    ]
    return Report(f"Sweep {sweep.folder}", answer(sweep, which, comparisons), warnings(sweep), sections)


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
        f"{named(label)} is {verdict} by {spread(found.difference).lstrip('-')} {found.unit}"
        for verdict in ("better", "worse")
        for label, found in comparisons.items()
        if found.verdict == verdict
    ]
    for verdict, words in ({"not distinguishable": "not distinguishable from it"} | NO_STATEMENT).items():
        labels = [named(label) for label, found in comparisons.items() if found.verdict == verdict]
        if labels:
            parts.append(f"{', '.join(labels)} {'is' if len(labels) == 1 else 'are'} {words}")
    counts = [found.difference.n for found in comparisons.values() if found.verdict not in NO_STATEMENT]
    over = f", over {' to '.join(map(str, sorted({min(counts), max(counts)})))} seeds" if counts else ""
    return f"Against {named(base.label)}{over}: {'; '.join(parts)}.{missing}"


def warnings(sweep: Sweep) -> list[str]:
    """Differences between finished runs that make them less comparable."""
    lines = []
    for name, words in CONDITIONS.items():
        recorded = [each.get(name) for each in sweep.summaries]
        counts = Counter("not recorded" if value is None else text_of(value) for value in recorded)
        if len(counts) > 1:
            values = "; ".join(f"{value} ({plural(n, 'run')})" for value, n in counts.most_common())
            lines.append(
                f"The finished runs differ in their {words}: {values}. Differences between variants may come from that."
            )
    if len({each.get("data_fingerprint") for each in sweep.summaries}) > 1:
        lines.append("The finished runs differ in their text or tokenizer: compare bits per byte, not nats per token.")
    leaks = sum("LEAK" in str(each.get("causality")) for each in sweep.summaries)
    if leaks:
        lines.append(
            f"The losses of {plural(leaks, 'finished run')} are invalid: the model sees the tokens it predicts."
        )
    return lines
